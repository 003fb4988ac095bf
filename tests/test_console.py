"""What a run prints, and how it hears that it is to stop."""

import io
import os
import signal
import threading

import pytest
from rich.console import Console

from jaxpar.console import asked_to_stop, progress, say, show_step, stopped, too_many_bad_steps

METRICS = {
    "loss": 2.34567,
    "grad_norm": 0.12345,
    "learning_rate": 1e-3,
    "skipped_in_a_row": 0,
    "tokens_per_second": None,
}


def file_console() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=40), file


def shown(step: int, steps: int, **metrics: float | None) -> str:
    console, file = file_console()
    with progress(console) as bar:
        show_step(bar, bar.add_task("", total=steps, loss=""), step, steps, METRICS | metrics)
    return file.getvalue()


def test_a_line_is_printed_as_it_is():
    console, file = file_console()
    say(console, "[bold]no markup[/bold] " + 60 * "x" + " one line")
    assert file.getvalue() == "[bold]no markup[/bold] " + 60 * "x" + " one line\n"


def test_in_a_file_twenty_lines_and_the_first_are_printed():
    assert [step for step in range(1, 101) if shown(step, 100)] == [1, *range(5, 101, 5)]
    assert [step for step in range(1, 8) if shown(step, 7)] == list(range(1, 8))


def test_a_line_names_what_is_known():
    assert shown(20, 100) == "step 20/100  loss 2.3457  grad_norm 0.123  learning_rate 0.001\n"
    more = shown(20, 100, tokens_per_second=12345.6, mfu=0.4567, staleness=1.25, validation_loss=2.0, something=3)
    assert more == (
        "step 20/100  loss 2.3457  validation_loss 2.0000  grad_norm 0.123  learning_rate 0.001  staleness 1.25  "
        "tokens_per_second 12,346  mfu 45.7%\n"
    )


def test_evaluations_and_steps_that_were_not_applied_are_always_told():
    assert shown(21, 100) == "" and "validation_loss 2.0000" in shown(21, 100, validation_loss=2.0)
    said = shown(21, 100, skipped_in_a_row=2, loss=float("nan"))
    assert said == "step 21 was not applied: loss nan, gradient norm 0.12345\n"


def test_why_a_run_ended():
    said = too_many_bad_steps(5, 4, "runs/a/checkpoints/8")
    assert said.startswith("5 steps in a row") and "train.max_bad_steps = 4" in said and "runs/a/checkpoints/8" in said
    assert (
        stopped(signal.SIGTERM, 7)
        == "stopped by SIGTERM after step 7, which is saved; the same command continues there"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_one_is_the_handler_s_before(number: signal.Signals):
    taken: list[int] = []
    before = {n: signal.signal(n, lambda received, _: taken.append(received)) for n in (signal.SIGINT, signal.SIGTERM)}
    own = {n: signal.getsignal(n) for n in before}
    try:
        with asked_to_stop() as signals:
            os.kill(os.getpid(), number)
            assert (signals, taken) == ([number], [])
            os.kill(os.getpid(), number)
            assert (signals, taken) == ([number], [number])
        assert {n: signal.getsignal(n) for n in before} == own
        os.kill(os.getpid(), number)
        assert (signals, taken) == ([number], [number, number])
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)


def test_outside_the_main_thread_no_signal_is_expected():
    before, seen = signal.getsignal(signal.SIGINT), []

    def run() -> None:
        with asked_to_stop() as signals:
            seen.append((list(signals), signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [([], before)]
