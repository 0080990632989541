"""Text while it is generated, in a loop and in an event loop: `python streaming.py [MODEL]`."""

import asyncio
import sys

import quadriga

model = quadriga.Model(sys.argv[1] if len(sys.argv) > 1 else None, n_ctx=1024)

stream = model.chat("Tell me about the sea.", max_tokens=40, stream=True)
for piece in stream:
    print(piece, end="", flush=True)
usage = stream.completion.usage
print(f"\n{usage.completion_tokens} tokens, the first after {usage.first_token_seconds:.2f} s")


async def tell(topic: str) -> str:
    text = ""
    async for piece in model.chat(f"A sentence about {topic}.", max_tokens=24, stream=True):
        text += piece.text
    return text


async def main() -> None:
    # One engine computes all three together.
    topics = ["rivers", "mountains", "deserts"]
    for topic, text in zip(topics, await asyncio.gather(*map(tell, topics))):
        print(f"{topic}: {text}")
        assert text


asyncio.run(main())
