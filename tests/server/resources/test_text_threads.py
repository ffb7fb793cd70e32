"""Small work does not wait for large work."""

import asyncio
import threading

from tokasaurus.server.resources.text_threads import LARGE_SIZE, NUM_SMALL_THREADS, TextThreads


def test_small_work_runs_while_all_threads_for_large_work_are_busy() -> None:
    async def run() -> None:
        threads, released = TextThreads(), threading.Event()
        try:
            large = [asyncio.ensure_future(threads.run(LARGE_SIZE, released.wait, 60)) for _ in range(100)]
            await asyncio.sleep(0)
            small = [threads.run(LARGE_SIZE - 1, str, number) for number in range(NUM_SMALL_THREADS + 1)]
            assert await asyncio.wait_for(asyncio.gather(*small), 30) == ["0", "1", "2", "3", "4"]
            assert not any(task.done() for task in large)
            released.set()
            assert all(await asyncio.wait_for(asyncio.gather(*large), 30))
        finally:
            released.set()
            threads.close()

    asyncio.run(run())
