"""Streams that event loops wait for: closed meanwhile, read by several, and of a model that is closed."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

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
