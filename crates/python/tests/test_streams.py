"""Streams that event loops and threads wait for: closed meanwhile, read by several, and of a model that is closed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import quadriga

#: Seconds after which a wait is one without end.
ENDLESS = 60


class Gate:
    """A logits processor that waits: until it is opened, the stream has no event."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self, tokens: object, logits: object) -> None:
        self.entered.set()
        self.opened.wait()


async def read(stream: quadriga.Stream) -> int:
    return len([piece async for piece in stream])


def test_closing_a_stream_ends_the_wait_of_an_event_loop(tiny: quadriga.Model) -> None:
    gate = Gate()

    async def run(in_thread: bool) -> int:
        stream = tiny.generate([1, 2, 3], stream=True, ignore_eos=True, logits_processors=[gate])
        reader = asyncio.create_task(read(stream))
        # Now it runs until it waits.
        await asyncio.sleep(0)
        if in_thread:
            closer = threading.Thread(target=stream.close)
            closer.start()
            closer.join()
        else:
            stream.close()
        return await asyncio.wait_for(reader, ENDLESS)

    try:
        assert [asyncio.run(run(in_thread)) for in_thread in (False, True)] == [0, 0]
    finally:
        gate.opened.set()


def test_several_tasks_read_a_stream(tiny: quadriga.Model) -> None:
    gate = Gate()

    async def run() -> list[int]:
        stream = tiny.generate([1, 2, 3], stream=True, max_tokens=6, ignore_eos=True, logits_processors=[gate])
        readers = [asyncio.create_task(read(stream)) for _ in range(3)]
        await asyncio.sleep(0)
        gate.opened.set()
        counts = await asyncio.wait_for(asyncio.gather(*readers), ENDLESS)
        assert len(stream.completion.tokens) == 6
        return counts

    try:
        # Every piece goes to one of them.
        assert sum(asyncio.run(run())) == 6
    finally:
        gate.opened.set()


def test_a_model_that_is_closed_during_a_call_wakes_event_loops(tiny_path: Path) -> None:
    gate, calling = Gate(), threading.Event()
    model = quadriga.Model(tiny_path, n_ctx=256)

    def call() -> None:
        calling.set()
        # It waits for the engine, which waits for the gate.
        model.clear_cache()

    async def run() -> None:
        stream = model.generate([1, 2, 3], stream=True, ignore_eos=True, logits_processors=[gate])
        reader = asyncio.create_task(read(stream))
        await asyncio.sleep(0)
        gate.entered.wait()
        other = threading.Thread(target=call)
        interval = sys.getswitchinterval()
        # The other thread keeps the GIL until it is in the call, which gives it up.
        sys.setswitchinterval(3600)
        try:
            other.start()
            calling.wait()
            model.close()
        finally:
            sys.setswitchinterval(interval)
            gate.opened.set()
        try:
            # The answer ends with the model, or before.
            await asyncio.wait_for(reader, ENDLESS)
        except quadriga.Closed:
            pass
        other.join()

    try:
        asyncio.run(run())
    finally:
        gate.opened.set()


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration])
def test_processors_do_not_end_an_answer_by_accident(tiny: quadriga.Model, kind: type[Exception]) -> None:
    # As in a generator (PEP 479): `next` of an iterator that is used up must not look like the end of the answer.
    def fail(tokens: object, logits: object) -> None:
        raise kind("used up")

    with pytest.raises(RuntimeError, match=f"logits processor raised {kind.__name__}") as caught:
        tiny.generate([1, 2, 3], max_tokens=4, logits_processors=[fail])
    assert isinstance(caught.value.__cause__, kind)

    async def read() -> None:
        async for _ in tiny.generate([1, 2, 3], stream=True, max_tokens=4, logits_processors=[fail]):
            pass

    with pytest.raises(RuntimeError, match=kind.__name__):
        asyncio.run(read())


def test_long_prompts_and_chats_are_prepared_beside_the_event_loop(
    tiny: quadriga.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    core = tiny._core  # pyright: ignore[reportPrivateUsage]

    class Watched:
        def __getattr__(self, name: str) -> Any:
            if name == "submit":
                threads.append(threading.get_ident())
            return getattr(core, name)

    monkeypatch.setattr(tiny, "_core", Watched())

    async def ask() -> None:
        await tiny.generate_async([1, 2, 3], max_tokens=1)
        with contextlib.suppress(quadriga.ContextFull):
            await tiny.generate_async("a " * 600, max_tokens=1)
        await tiny.generate_async([1], max_tokens=1, grammar='root ::= "a"')
        await tiny.chat_async("Hi", max_tokens=1)

    asyncio.run(ask())
    own = threading.get_ident()
    assert threads[0] == own and own not in threads[1:] and len(threads) == 4


def test_threads_that_wait_by_turns_all_come_to_their_end(tiny: quadriga.Model) -> None:
    """Readers are woken one after another: none may be forgotten behind one that goes away, or that reads with another thread."""
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    choices = random.Random(seed)
    expected = {count: tiny.generate([5, 6, 7], max_tokens=count, temperature=0, ignore_eos=True).tokens for count in range(1, 25)}
    plans = [[(choices.randrange(1, 25), choices.choice(["read", "leave", "close", "share"])) for _ in range(6)] for _ in range(16)]
    failures: list[object] = []

    def read(stream: quadriga.Stream, into: list[int]) -> None:
        into.extend(piece.token for piece in stream)

    def work(plan: list[tuple[int, str]]) -> None:
        for count, way in plan:
            stream = tiny.generate([5, 6, 7], stream=True, max_tokens=count, temperature=0, ignore_eos=True)
            tokens: list[int] = []
            if way == "leave":
                next(stream)
                del stream
                continue
            if way == "close":
                other = threading.Thread(target=read, args=(stream, tokens))
                other.start()
                stream.close()
                other.join()
                continue
            if way == "share":
                parts: list[list[int]] = [[], []]
                others = [threading.Thread(target=read, args=(stream, part)) for part in parts]
                for other in others:
                    other.start()
                for other in others:
                    other.join()
                tokens = sorted(parts[0] + parts[1])
            else:
                read(stream, tokens)
            wanted = sorted(expected[count]) if way == "share" else expected[count]
            if tokens != wanted:
                failures.append((count, way, tokens, wanted))

    threads = [threading.Thread(target=work, args=(plan,), daemon=True) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    assert failures == []
