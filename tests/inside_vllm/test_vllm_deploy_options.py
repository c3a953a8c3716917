"""The options in deploy/ for vLLM's production stack are options of `vllm serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: run `make test-vllm`")

import yaml
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.import_utils import resolve_obj_by_qualname

VALUES = sorted((Path(__file__).parents[2] / "deploy" / "vllm").glob("values*.yaml"))


def words_of(spec: dict[str, Any]) -> list[str]:
    """Return the options with which the chart starts the server, as its template makes them."""
    config = spec["vllmConfig"]
    switches = {
        "enableChunkedPrefill": "enable-chunked-prefill",
        "enablePrefixCaching": "enable-prefix-caching",
    }
    words = [f"--{'' if config[key] else 'no-'}{name}" for key, name in switches.items()]
    return [*words, "--max-model-len", str(config["maxModelLen"]), *config["extraArgs"]]


@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)
def test_vllm_knows_all_options_and_finds_the_classes(path: Path) -> None:
    [spec] = yaml.safe_load(path.read_text("utf-8"))["servingEngineSpec"]["modelSpec"]
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers())
    args = parser.parse_args(["serve", spec["modelURL"], *words_of(spec)])
    assert args.enable_chunked_prefill
    assert args.additional_config["slosched"]["policy"] == "goodput+door"
    for name in (args.scheduler_cls, *args.middleware):
        assert callable(resolve_obj_by_qualname(name))
