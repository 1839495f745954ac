# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The thread that repeats a step, and the job that has a thread while it runs."""

from __future__ import annotations

import os
import queue
import threading

import pytest

from agent.core.worker import BackgroundJob, Worker

PATIENCE_SECONDS = 30.0  # only a failing test waits for it


def test_a_step_is_repeated_when_it_asked_and_at_once_when_woken() -> None:
    steps = queue.Queue[int]()
    waits = iter([0.0, 0.001, None, None])

    def step() -> float | None:
        steps.put(1)
        return next(waits)

    worker = Worker("test", step)
    worker.start()
    for _ in range(3):
        steps.get(timeout=PATIENCE_SECONDS)
    worker.wake()
    steps.get(timeout=PATIENCE_SECONDS)
    assert worker.close(PATIENCE_SECONDS)
    assert steps.empty()


def test_a_step_that_raises_is_counted_and_the_next_one_comes() -> None:
    worked = threading.Event()

    def step() -> float | None:
        if worker.failures < 2:
            raise RuntimeError("broken")
        worked.set()
        return None

    worker = Worker("test", step, retry_seconds=0.0)
    worker.start()
    assert worked.wait(PATIENCE_SECONDS)
    assert worker.close(PATIENCE_SECONDS)
    assert worker.failures == 2


def test_stopping_cuts_a_wait_short_and_no_step_follows() -> None:
    steps = queue.Queue[int]()

    def step() -> float | None:
        steps.put(1)
        return 3600.0

    worker = Worker("test", step)
    worker.start()
    steps.get(timeout=PATIENCE_SECONDS)
    assert worker.close(PATIENCE_SECONDS)
    assert steps.empty()


def test_closing_reports_a_step_that_still_runs() -> None:
    entered, leave = threading.Event(), threading.Event()

    def step() -> float | None:
        entered.set()
        leave.wait(PATIENCE_SECONDS)
        return None

    worker = Worker("test", step)
    worker.start()
    assert entered.wait(PATIENCE_SECONDS)
    assert not worker.close(0.0)
    leave.set()
    assert worker.close(PATIENCE_SECONDS)


def test_one_that_was_never_started_closes() -> None:
    assert Worker("test", lambda: None).close()


def test_a_descriptor_that_becomes_readable_cuts_a_wait_short_and_so_do_wake_and_stop() -> None:
    steps = queue.Queue[bytes]()
    reader, writer = os.pipe()
    os.set_blocking(reader, False)

    def step() -> float | None:
        try:
            steps.put(os.read(reader, 1))
        except BlockingIOError:
            steps.put(b"")
        return 3600.0

    worker = Worker("test", step, readable=lambda: [reader])
    worker.start()
    assert steps.get(timeout=PATIENCE_SECONDS) == b""
    os.write(writer, b"a")
    assert steps.get(timeout=PATIENCE_SECONDS) == b"a"
    worker.wake()
    assert steps.get(timeout=PATIENCE_SECONDS) == b""
    assert worker.close(PATIENCE_SECONDS)
    assert steps.empty()
    os.close(reader)
    os.close(writer)


def test_a_step_that_fails_on_a_readable_descriptor_is_not_repeated_at_once() -> None:
    failed = queue.Queue[int]()
    reader, writer = os.pipe()
    os.write(writer, b"a")

    def step() -> float | None:
        failed.put(1)
        raise RuntimeError("broken")

    worker = Worker("test", step, retry_seconds=3600.0, readable=lambda: [reader])
    worker.start()
    failed.get(timeout=PATIENCE_SECONDS)
    assert worker.close(PATIENCE_SECONDS)
    assert failed.empty()
    os.close(reader)
    os.close(writer)


def test_a_job_runs_once_at_a_time_and_again_when_it_is_over() -> None:
    begun, room = queue.Queue[int](), threading.Event()

    def act() -> None:
        begun.put(1)
        assert room.wait(PATIENCE_SECONDS)

    job = BackgroundJob("test", act)
    assert job.start()
    begun.get(timeout=PATIENCE_SECONDS)
    assert job.running
    assert not job.start()
    room.set()
    job.wait()
    assert job.start()
    job.wait()
    assert begun.qsize() == 1


def test_a_job_that_raises_is_counted_and_can_be_started_again() -> None:
    def act() -> None:
        raise RuntimeError("broken")

    job = BackgroundJob("test", act)
    for runs in (1, 2):
        assert job.start()
        job.wait()
        assert job.failures == runs


def test_a_job_for_which_no_thread_can_be_made_is_counted_and_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ran = threading.Event()
    job = BackgroundJob("test", ran.set)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert not job.start()
        job.wait()
    assert (job.failures, ran.is_set()) == (1, False)
    assert job.start()
    job.wait()
    assert ran.is_set()
