"""Commands that measure a running server, against one that asks for a key."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from command_line import Said
from live_server import live

pytestmark = pytest.mark.e2e

Cli = Callable[..., Said]
SHORT = ("--trace", "poisson", "--max-prompt-tokens", "16", "--max-output-tokens", "4")
COMMANDS = (
    ("replay", *SHORT, "-n", "3", "--rate", "50", "--url"),
    ("capacity", *SHORT, "-n", "4", "--seeds", "2", "--max-rate", "20", "--url"),
    ("profile", "--time-limit", "1s", "--overwrite", "-o", "traffic.csv", "--record"),
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live(api_keys=("secret",)) as server:
        yield server.url


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: str(words[0]))
def test_without_its_key_it_says_how_to_give_it(
    words: tuple[str, ...], url: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLOSCHED_API_KEY", raising=False)
    said = cli(*words, url)
    assert said.status == 1
    assert "asks for a key (HTTP 401): give it with --api-key or in SLOSCHED_API_KEY" in said.err
    said = cli(*words, url, "--api-key", "guessed")
    assert "asks for another key" in said.err


@pytest.mark.parametrize("keys", ["secret", "secret another"], ids=["one", "several"])
def test_the_first_key_of_the_environment_is_sent(
    keys: str, url: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOSCHED_API_KEY", keys)
    said = cli(*COMMANDS[0], url)
    assert said.status == 0, said.err
    assert "100.0%" in said.out


def test_a_capacity_is_measured_with_the_key(url: str, cli: Cli) -> None:
    said = cli(*COMMANDS[1], url, "--api-key", "secret")
    assert said.status == 0, said.err
    assert "requests/s" in said.out


def test_a_recorder_is_let_in_with_the_key(url: str, cli: Cli) -> None:
    said = cli(*COMMANDS[2], url, "--api-key", "secret")
    assert "nothing was recorded" in said.err, "no request came meanwhile"
