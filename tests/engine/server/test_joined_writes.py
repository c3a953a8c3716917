"""What is written in one turn of the event loop is sent as one piece, and nothing is lost."""

from __future__ import annotations

import asyncio

from slosched.engine.server.joined_writes import JoinedWrites


class Sent:
    """Records what it is told to send, piece by piece."""

    def __init__(self) -> None:
        self.pieces: list[bytes | str] = []

    def write(self, data: bytes) -> None:
        self.pieces.append(data)

    def close(self) -> None:
        self.pieces.append("close")

    def abort(self) -> None:
        self.pieces.append("abort")

    def is_closing(self) -> bool:
        return False


def sent_by(*turns: tuple[bytes | str, ...]) -> list[bytes | str]:
    """Return what is sent if each turn writes these pieces, closes or aborts."""

    async def play() -> list[bytes | str]:
        sent = Sent()
        joined = JoinedWrites(sent, asyncio.get_running_loop())  # type: ignore[arg-type]
        for turn in turns:
            for piece in turn:
                if isinstance(piece, bytes):
                    joined.write(piece)
                else:
                    getattr(joined, piece)()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert not joined.is_closing()
        return sent.pieces

    return asyncio.run(play())


def test_head_and_body_of_an_answer_are_one_piece() -> None:
    assert sent_by((b"head", b"body")) == [b"headbody"]


def test_what_comes_in_a_later_turn_is_a_piece_of_its_own() -> None:
    assert sent_by((b"first", b" token"), (b"second",)) == [b"first token", b"second"]


def test_all_is_sent_before_the_connection_is_closed() -> None:
    assert sent_by((b"last", b" words", "close")) == [b"last words", "close"]


def test_lines_keep_their_place() -> None:
    async def play() -> list[bytes | str]:
        sent = Sent()
        joined = JoinedWrites(sent, asyncio.get_running_loop())  # type: ignore[arg-type]
        joined.write(b"a")
        joined.writelines((b"b", b"c"))
        await asyncio.sleep(0)
        return sent.pieces

    assert asyncio.run(play()) == [b"abc"]


def test_an_aborted_connection_sends_no_more() -> None:
    assert sent_by((b"sent",), (b"lost", "abort")) == [b"sent", "abort"]


def test_bytes_that_change_later_are_sent_as_they_were() -> None:
    buffer = bytearray(b"now")

    async def play() -> list[bytes | str]:
        sent = Sent()
        joined = JoinedWrites(sent, asyncio.get_running_loop())  # type: ignore[arg-type]
        joined.write(buffer)
        buffer[:] = b"new"
        await asyncio.sleep(0)
        return sent.pieces

    assert asyncio.run(play()) == [b"now"]
