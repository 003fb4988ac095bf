"""The `data` section of a config to training and validation examples."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxpar.config import Config, InputError, Source
from jaxpar.data.examples import EvaluationExamples, TrainExamples
from jaxpar.data.inputs import expand
from jaxpar.data.token_file import TokenFile, open_token_file
from jaxpar.data.tokenize import fingerprint, write_tokens
from jaxpar.data.tokenizers import Tokenizer, load_tokenizer
from jaxpar.data.windows import Span, Windows, hold_out


@dataclass(frozen=True)
class Data:
    """What a run reads.

    Attributes:
        train: The training batches.
        validation: The batches of an evaluation, or None.
        tokenizer: Of all of them.
        summary: Lines for people: sources, tokens, windows, epochs.
    """

    train: TrainExamples
    validation: EvaluationExamples | None
    tokenizer: Tokenizer
    summary: tuple[str, ...]


def open_data(config: Config, cache_dir: Path) -> Data:
    """Opens everything that `config.data` names. Text is tokenized on the first start and found again on the next.

    Paths that end in `.tokens` are read as they are. The text files of a source become one token file in `cache_dir`,
    under a name made from their paths, sizes and times and the tokenizer, so that changed text is tokenized anew.
    Every host calls this. With a shared folder one host tokenizes and the others wait; with folders of their own,
    each makes the same file.

    Args:
        config: The run's config.
        cache_dir: Folder for token files made here; it is made if need be.

    Returns:
        The examples.

    Raises:
        InputError: Names the key or the file, what is wrong with it, and what to do.
    """
    tokenizer, length = load_tokenizer(config.data.tokenizer), config.data.sequence_length
    reader = _Reader(config, cache_dir, tokenizer)
    lines, train, held_out, counts = [], [], [], []
    batch, steps = config.train.global_batch, config.train.steps
    fraction = config.data.validation if isinstance(config.data.validation, float) else None
    weights = [source.weight for source in config.data.train]
    for number, source in enumerate(config.data.train):
        key = f"data.train[{number}]" if len(config.data.train) > 1 else "data.train"
        spans = reader.open(source, key)
        tokens = sum(span.stop for span in spans)
        if fraction is not None:
            spans, tail = hold_out(spans, length, fraction)
            held_out += tail
            if not all(any(span.windows(length) for span in part) for part in (spans, tail)):
                raise InputError(
                    f"data.validation={fraction} of {key}: {tokens} tokens do not make one sequence to train on and "
                    f"one to hold out (data.sequence_length={length}). Give more text, a shorter "
                    "data.sequence_length, or a list of files in data.validation."
                )
        train += spans
        counts.append(sum(span.windows(length) for span in spans))
        epochs = steps * batch * weights[number] / sum(weights) / counts[-1]
        share = f", {weights[number] / sum(weights):.1%} of each batch" if len(weights) > 1 else ""
        lines.append(
            f"{key}: {_shortened(source.paths)}: {tokens:,} tokens, {counts[-1]:,} training sequences of {length}"
            f"{share}; this run reads them {epochs:.3g} times"
        )
    if isinstance(config.data.validation, tuple):
        for number, source in enumerate(config.data.validation):
            key = f"data.validation[{number}]" if len(config.data.validation) > 1 else "data.validation"
            if source.weight != 1:
                raise InputError(
                    f"{key}.weight={source.weight} has no meaning: an evaluation reads all sources alike. Remove it."
                )
            held_out += reader.open(source, key)
    validation = None
    if held_out:
        windows = Windows(held_out, length, config.model.vocab_size)
        validation = EvaluationExamples(windows, batch, config.train.eval_batches)
        for number in range(len(validation)):  # what is wrong with them is known now, by all processes alike
            validation.rows(number, range(batch))
        lines.append(
            f"data.validation: {len(windows):,} sequences of {length}, of which each evaluation reads "
            f"{validation.windows:,} in {len(validation)} batches"
        )
    windows = Windows(train, length, config.model.vocab_size)
    examples = TrainExamples(windows, counts, weights, batch, config.train.seed)
    return Data(examples, validation, tokenizer, tuple(lines))


@dataclass(frozen=True)
class _Reader:
    config: Config
    cache_dir: Path
    tokenizer: Tokenizer

    def open(self, source: Source, key: str) -> list[Span]:
        """All tokens of a source: its token files in order, then its text files."""
        files = expand(source.paths, key)
        token_files = [open_token_file(file) for file in files if file.suffix == ".tokens"]
        if text_files := [file for file in files if file.suffix != ".tokens"]:
            token_files.append(self._tokenized(text_files))
        for file in token_files:
            file.check(self.tokenizer, self.config.model.vocab_size)
        spans = [Span(file.tokens, 0, file.header.tokens, str(file.path)) for file in token_files]
        _refuse_nothing(spans, self.config.data.sequence_length, f"{key} ({_shortened(source.paths)})")
        return spans

    def _tokenized(self, files: Sequence[Path]) -> TokenFile:
        path = self.cache_dir / f"{fingerprint(files, self.tokenizer)[:16]}.tokens"
        if not path.exists():
            write_tokens(files, path, self.tokenizer, replace=False)
        return open_token_file(path)


def _refuse_nothing(spans: Sequence[Span], length: int, what: str) -> None:
    if not any(span.windows(length) for span in spans):
        most = max(span.stop - span.start for span in spans)
        raise InputError(
            f"{what}: {most} tokens are too few for one sequence, which takes data.sequence_length + 1 = {length + 1} "
            f"tokens. Give more text, or set data.sequence_length to at most {max(most - 1, 1)}."
        )


def _shortened(paths: Sequence[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
