"""The public traces that can be fetched: addresses, licences and checksums.

Addresses name a commit or a release, so that the file behind a checksum does not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slosched.spelling import meant

_AZURE = "Azure/AzurePublicDataset"
_AZURE_AT = "b469a113cedca53ddc3bdea71a143dc4b7d8700c"
_MOONCAKE = "kvcache-ai/Mooncake"
_MOONCAKE_AT = "3b5a594133958449a1feaf1c9e0fc1b553e34a28"
_BAILIAN = "alibaba-edu/qwen-bailian-usagetraces-anon"
_BAILIAN_AT = "5f7439c51ec248a0c585f7d90a41a6f57773b912"
_THE_FILE = "the file itself"
_PUBLISHER = "its publisher"
_OTHERS = "others who have fetched it"


@dataclass(frozen=True, slots=True)
class PublicTrace:
    """A published trace file."""

    what: str
    url: str
    source: str
    """The publisher's repository, and the commit or release of it."""
    licence: str
    sha256: str
    size_bytes: int | None = None
    checked: str = _THE_FILE
    """The source of the checksum."""

    @property
    def suffix(self) -> str:
        return "." + self.url.rpartition(".")[2]


def _azure_2023(what: str, kind: str, sha256: str, size_bytes: int) -> PublicTrace:
    url = f"https://raw.githubusercontent.com/{_AZURE}/{_AZURE_AT}/data/AzureLLMInferenceTrace_"
    source = f"{_AZURE} @ {_AZURE_AT[:8]}"
    return PublicTrace(what, f"{url}{kind}.csv", source, "CC-BY-4.0", sha256, size_bytes)


def _azure_2024(what: str, kind: str, sha256: str, size_bytes: int | None) -> PublicTrace:
    release = f"https://github.com/{_AZURE}/releases/download/dataset-llm-2024"
    return PublicTrace(
        what,
        f"{release}/AzureLLMInferenceTrace_{kind}_1week.csv",
        f"{_AZURE}, release dataset-llm-2024",
        "CC-BY-4.0",
        sha256,
        size_bytes,
        checked=_OTHERS,
    )


def _burstgpt(what: str, part: str, sha256: str, size_bytes: int, checked: str) -> PublicTrace:
    url = f"https://github.com/HPMLL/BurstGPT/releases/download/v2.0/BurstGPT_{part}.csv"
    source = "HPMLL/BurstGPT, release v2.0"
    return PublicTrace(what, url, source, "CC-BY-4.0", sha256, size_bytes, checked)


def _mooncake(
    what: str, path: str, sha256: str, size_bytes: int | None, checked: str = _THE_FILE
) -> PublicTrace:
    url = f"https://raw.githubusercontent.com/{_MOONCAKE}/{_MOONCAKE_AT}/FAST25-release/{path}"
    source = f"{_MOONCAKE} @ {_MOONCAKE_AT[:8]}"
    return PublicTrace(what, url, source, "Apache-2.0", sha256, size_bytes, checked)


def _bailian(what: str, kind: str, sha256: str, size_bytes: int, checked: str) -> PublicTrace:
    url = f"https://media.githubusercontent.com/media/{_BAILIAN}/{_BAILIAN_AT}"
    source = f"{_BAILIAN} @ {_BAILIAN_AT[:8]}"
    full_url = f"{url}/qwen_{kind}_blksz_16.jsonl"
    return PublicTrace(what, full_url, source, "Apache-2.0", sha256, size_bytes, checked)


PUBLIC_TRACES: Mapping[str, PublicTrace] = {
    "azure_conv_2023": _azure_2023(
        "conversations, an hour, 19,366 requests",
        "conv",
        "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
        719_188,
    ),
    "azure_code_2023": _azure_2023(
        "code completion, an hour, 8,819 requests",
        "code",
        "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
        320_117,
    ),
    "azure_conv_2024": _azure_2024(
        "conversations, a week, 27,303,999 requests",
        "conv",
        "a0cc9b969a9bbf0fd811802cbf4323edd3a209ace791e3799ad4f9207f213941",
        1_135_195_393,
    ),
    "azure_code_2024": _azure_2024(
        "code completion, a week, 16,803,695 requests",
        "code",
        "71de5c55cbc35f8f1ed0b6b7806b4cd1e9764b0058469725a6aac98023a1448f",
        None,
    ),
    "burstgpt_1": _burstgpt(
        "ChatGPT and GPT-4 at a campus, 61 days, 1.4 million requests",
        "1",
        "4bb3783693d0a435686fbfc885615d2349bd067239079fa4b749f2e679e12122",
        52_283_111,
        _PUBLISHER,
    ),
    "burstgpt_2": _burstgpt(
        "the next 60 days, 3.9 million requests",
        "2",
        "44bf5942b03fca42c01a226a545ad3a750ec62688faecd67b6831c56a8928bf7",
        144_819_209,
        _OTHERS,
    ),
    "burstgpt_3": _burstgpt(
        "another 110 days, 5.3 million requests, with sessions",
        "3",
        "2299986a07388aa303ec2c41d1131e756db650a39ed6ef9dfe7cc3d7f9a43b8f",
        231_682_327,
        _OTHERS,
    ),
    "mooncake_conversation": _mooncake(
        "Kimi's conversations, an hour, 12,031 requests, prefix hashes",
        "traces/conversation_trace.jsonl",
        "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
        3_029_533,
    ),
    "mooncake_synthetic": _mooncake(
        "made from public data sets, 3,993 requests, prefix hashes",
        "traces/synthetic_trace.jsonl",
        "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
        1_136_313,
    ),
    "mooncake_toolagent": _mooncake(
        "Kimi's tools and agents, an hour, 23,608 requests, prefix hashes",
        "traces/toolagent_trace.jsonl",
        "48a2db1a13d3bc05e6330140c64f604ba366df20d3c9e128b5c35a01c1fa5f71",
        None,
        _OTHERS,
    ),
    "bailian_chat": _bailian(
        "Qwen for consumers, two hours, sessions and prefix hashes",
        "traceA",
        "07cedc9ed8aff301994ac68ed4aede8123b7603673575eeba9dd677de663db17",
        56_354_493,
        _OTHERS,
    ),
    "bailian_api": _bailian(
        "Qwen behind an API, two hours, 172,800 requests, prefix hashes",
        "traceB",
        "68e3f98e2d601d60d0abf4b89bc8a3654372abab7b1cde6373a13d0054379d59",
        96_209_982,
        _OTHERS,
    ),
    "bailian_coder": _bailian(
        "Qwen writing code, prefix hashes",
        "coder",
        "3d74974cebb7bccb69b1ca6ea210a44d9a3033443c0271ed015327284dea1aff",
        132_054_902,
        _PUBLISHER,
    ),
    "bailian_thinking": _bailian(
        "Qwen thinking, prefix hashes",
        "thinking",
        "41ac36d9d1b54d084eeb6b05e9d142ba9d02f8bf79cfc9fff418d8ab7cdee906",
        27_901_454,
        _PUBLISHER,
    ),
}
"""The public traces by the name that `slosched trace fetch` and `--trace` take."""


def public_trace(name: str) -> PublicTrace:
    """Return the trace of this name; raise ValueError if there is none."""
    if name not in PUBLIC_TRACES:
        raise ValueError(
            f"no public trace {name!r}{meant(name, PUBLIC_TRACES)}; choose one of "
            f"{', '.join(PUBLIC_TRACES)}"
        )
    return PUBLIC_TRACES[name]
