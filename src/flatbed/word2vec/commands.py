"""The commands `flatbed word2vec` and `flatbed neighbors`."""

from __future__ import annotations

import inspect
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import torch
import typer
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from flatbed import FlatbedError
from flatbed.word2vec.corpus import Corpus, python_corpus, read_corpus
from flatbed.word2vec.settings import Settings, remove_checkpoint, saved_run
from flatbed.word2vec.trainer import Trainer
from flatbed.word2vec.vectors import Vectors, plot_loss, plot_map

LIBRARY_DEFAULTS = {"window": 2, "epochs": 20, "min_count": 40}
"""For the standard library, which is small: rare names have the contexts of a single file."""
SHOWN = ["append", "open", "list", "True", "try", "ValueError", "lock", "min"]
"""Words whose neighbours are shown at the end; frequent words replace those that are not in the text."""
N_SHOWN = 8
MOST_THREADS = 2
"""Threads by default, where there are more cores: with more of them, steps see older rows."""
LINE_SECONDS = 10.0
"""Seconds between progress lines where stderr is not a terminal."""
INTERRUPTED = 130
"""The usual exit code of programs ended by Ctrl-C."""


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Replace `**options` in a command's signature by an option for each field of `Settings`.

    Options that are not given are None, so that the command can choose their defaults.
    """
    signature = inspect.signature(command, eval_str=True)
    params = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    hints = get_type_hints(Settings, include_extras=True)
    defaults = {"ngrams": "3-6", "threads": f"the number of cores, at most {MOST_THREADS}"}
    for each in fields(Settings):
        kind = {"ngrams": str, "path": Path}.get(each.name, hints[each.name].__origin__)
        default = defaults.get(each.name, each.default)
        option = typer.Option(
            None,
            *((f"--{each.name}/--no-{each.name}",) if kind is bool else ()),
            help=hints[each.name].__metadata__[0],
            show_default=False if default is None else str(default),
        )
        param = inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=option)
        params.append(param.replace(annotation=kind | None))
    command.__signature__ = signature.replace(parameters=params)  # type: ignore[attr-defined]
    return command


@_with_settings
def word2vec(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Texts, a sentence per line.", exists=True, dir_okay=False)
    ] = None,
    *,
    out: Annotated[Path, typer.Option(help="Output file, in word2vec's format.", dir_okay=False)] = Path(
        "vectors.txt"
    ),
    binary: Annotated[bool, typer.Option("--binary", help="Write word2vec's binary format.")] = False,
    encoding: Annotated[str, typer.Option(help="Encoding of the texts.")] = "utf-8",
    max_words: Annotated[int | None, typer.Option(min=1, help="Read no more words of text.")] = None,
    also: Annotated[
        Path | None,
        typer.Option(
            help="A file of further words, which get vectors, too; needs --buckets.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Folder of checkpoints, which Ctrl-C and SIGTERM save, too; OUT.checkpoint by default.",
            file_okay=False,
        ),
    ] = None,
    checkpoint_every: Annotated[
        float, typer.Option(min=0, help="Minutes between checkpoints while training; 0 for none.")
    ] = 10.0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint.")] = False,
    pictures: Annotated[bool, typer.Option(help="Plot the loss and a map of words next to OUT.")] = True,
    **options: Any,
) -> None:
    """Train word vectors: skip-gram or CBOW with negative sampling, over tables in host memory.

    Without FILES, the text is the source of Python's standard library, with the defaults --window 2,
    --epochs 20 and --min-count 40.
    """
    files = files or []
    checkpoint = checkpoint or Path(f"{out}.checkpoint")
    plots = (out.with_suffix(".loss.png"), out.with_suffix(".map.png")) if pictures else ()
    with _errors(code=2):
        defaults = {"threads": min(torch.get_num_threads(), MOST_THREADS)}
        settings = _settings(options, defaults if files else defaults | LIBRARY_DEFAULTS)
        if also is not None and not settings.buckets:
            raise ValueError("--also needs n-grams: give --buckets, 1000000 for example")
    with _errors():
        with _printed_warnings():
            further = [] if also is None else read_corpus(also, encoding=encoding).words
        _check_outputs([*files, also] if also else files, out, plots)
        _check_checkpoint(checkpoint, settings, resume=resume)
        # Threads of torch's operations wait for each other many times in a step.
        torch.set_num_threads(1 if settings.n_parallel_steps > 1 else max(settings.threads // 2, 1))
        corpus = _read(files, encoding, max_words)
        with closing(Trainer(corpus, settings)) as trainer:
            typer.echo(
                f"{len(trainer.corpus.words):,} words occur {settings.min_count} times or more; dim "
                f"{settings.dim}, {settings.optimizer}, tables on the {settings.storage}, computed on "
                f"{settings.torch_device}"
            )
            if resume:
                trainer.resume(checkpoint)
                typer.echo(f"continuing at step {trainer.step:,} of {trainer.n_steps:,}")
            _train(trainer, checkpoint, 60 * checkpoint_every)
            vectors = _write(trainer, out, checkpoint, further, binary=binary)
        if settings.storage == "disk":
            typer.echo(f"finished; delete {settings.path} and {checkpoint} to start again")
        elif saved_run(checkpoint) is not None:
            remove_checkpoint(checkpoint)
            typer.echo(f"removed {checkpoint}: the training has finished")
    if plots:
        _plot(trainer, vectors, *plots)
    shown = [word for word in SHOWN if word in vectors] + [w for w in vectors.words[:200] if len(w) > 3]
    _print_neighbors(vectors, list(dict.fromkeys(shown))[:N_SHOWN], 6)
    typer.echo(f"for other words: flatbed neighbors {out} WORD...")


def neighbors(
    vectors: Annotated[
        Path, typer.Argument(help="A file in word2vec's text or binary format.", exists=True, dir_okay=False)
    ],
    words: Annotated[list[str], typer.Argument(help="Words to show neighbours of.", metavar="WORD...")],
    n: Annotated[int, typer.Option("-n", min=1, help="Neighbours per word.")] = 8,
) -> None:
    """Show the words whose vectors have the most similar directions."""
    with _errors(), _printed_warnings():
        loaded = Vectors.load(vectors)
    _print_neighbors(loaded, [word for word in words if word in loaded], n)
    unknown = [word for word in words if word not in loaded]
    for word in unknown:
        with _errors(code=None):
            loaded[word]
    if unknown:
        raise typer.Exit(1)


# ---- messages


@contextmanager
def _errors(code: int | None = 1) -> Iterator[None]:
    """Print expected errors in one line, without a traceback, and exit with a code if there is one."""
    try:
        yield
    except (FlatbedError, OSError, ValueError) as error:
        typer.echo(f"Error: {error}", err=True)
        if code is not None:
            raise typer.Exit(code) from error


@contextmanager
def _printed_warnings() -> Iterator[None]:
    """Print warnings in one line each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        typer.echo(f"Warning: {warning.message}", err=True)


@contextmanager
def _progress_bar(title: str) -> Iterator[Callable[..., None]]:
    """Yield `update(done, total, text="")`: a bar on stderr, or lines where stderr is not a terminal."""
    console, last = Console(stderr=True), time.monotonic()

    def print_line(done: int, total: int, text: str = "") -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            percent = f"{done / max(total, 1):.0%}"
            typer.echo(f"{title}: {done:,} of {total:,} ({percent}){text and f', {text}'}", err=True)

    if not console.is_terminal:
        yield print_line
        return
    columns = (*Progress.get_default_columns(), TimeElapsedColumn(), TextColumn("{task.fields[text]}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None, text="")
        yield lambda done, total, text="": bar.update(task, completed=done, total=total, text=text)


def _print_neighbors(vectors: Vectors, words: Sequence[str], n: int) -> None:
    """Print a line per word: its neighbours and their cosines."""
    if words:
        typer.secho("nearest neighbours and cosines", bold=True)
    width = max(map(len, words), default=0)
    for word in words:
        found = "  ".join(f"{other} {cosine:.2f}" for other, cosine in vectors.neighbors(word, n))
        typer.echo(f"  {word:{width}}  {found}")


# ---- settings and files


def _settings(options: dict[str, Any], defaults: dict[str, Any]) -> Settings:
    given = {name: value for name, value in options.items() if value is not None}
    if "ngrams" in given:
        lengths = given["ngrams"].split("-")
        if len(lengths) > 2 or not all(length.isdecimal() for length in lengths):
            raise ValueError(f"--ngrams must be lengths such as 3-6; found {given['ngrams']!r}")
        given["ngrams"] = (int(lengths[0]), int(lengths[-1]))
        if not given.get("buckets"):
            raise ValueError("--ngrams needs --buckets, 1000000 for example: without, there are no n-grams")
    settings = Settings(**defaults | given)
    try:
        torch.empty(0, device=settings.torch_device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"--device: torch cannot use {settings.device!r} ({error}); `flatbed doctor` says more"
        ) from error
    return settings


def _draft(out: Path) -> Path:
    """Return the name of the output until it is complete."""
    return out.with_name(f".{out.name}.new")


def _check_outputs(texts: Sequence[Path], out: Path, plots: Sequence[Path]) -> None:
    """Raise if a text would be overwritten, or if the vectors could not be written at the end."""
    for text in texts:
        for path in (out, _draft(out), *plots):
            if path.exists() and path.samefile(text):
                raise ValueError(f"the text {text} would be overwritten by {path}: give another --out")
    if out.exists() and not out.is_file():  # renaming would replace a device or a pipe
        raise ValueError(f"--out: {out} is not a regular file: give another name")
    try:
        _draft(out).touch()
        _draft(out).unlink()
    except OSError as error:
        raise ValueError(
            f"--out: {out} cannot be written ({error.strerror}): give another folder or name"
        ) from None


def _check_checkpoint(checkpoint: Path, settings: Settings, *, resume: bool) -> None:
    """Raise if there is no run to resume, or if a new run would overwrite one."""
    saved = saved_run(checkpoint)
    if resume and saved is None:
        raise FlatbedError(f"{checkpoint} holds no checkpoint: run without --resume, or check the path")
    if saved is not None and not resume:
        shown = ", ".join(f"{name} {saved['settings'].get(name)}" for name in ("dim", "epochs", "optimizer"))
        folders = f"{checkpoint} and {settings.path}" if settings.path else checkpoint
        raise FlatbedError(
            f"{checkpoint} holds a training at step {saved['step']:,} of {saved['steps']:,} ({shown}): "
            f"continue it with --resume, delete {folders} to start again, or give another --checkpoint"
        )


def _read(files: Sequence[Path], encoding: str, max_words: int | None) -> Corpus:
    with _printed_warnings(), _progress_bar("reading") as update:
        if files:
            corpus = read_corpus(files, encoding=encoding, max_words=max_words, progress=update)
        else:
            corpus = python_corpus(max_words=max_words, progress=update)
    name = f"{len(files)} files" if len(files) > 1 else files[0] if files else "Python's standard library"
    typer.echo(f"{name}: {len(corpus):,} words of text, {len(corpus.words):,} distinct")
    return corpus


# ---- training


def _train(trainer: Trainer, checkpoint: Path, save_seconds: float) -> None:
    """Train to the end. A signal ends training after the current step, with a checkpoint."""
    report, last_save = None, time.monotonic()
    # The handlers last: a loop forgets a `stop()` from before it began.
    with _progress_bar("training") as update, _stopped_by_signals(trainer.stop):
        for report in trainer:
            speed = f"{report.words_per_second:,.0f} words/s, loss {report.loss:.3f}"
            update(report.words, report.n_words, f"epoch {report.epoch}, {speed}")
            if save_seconds and not trainer.done and time.monotonic() - last_save >= save_seconds:
                trainer.save(checkpoint)
                last_save = time.monotonic()
    if report is not None:
        typer.echo(f"trained {report.words:,} words: {speed}")
    if not trainer.done or trainer.settings.storage == "disk":
        trainer.save(checkpoint)
    if not trainer.done:
        typer.echo(
            f"saved step {trainer.step:,} of {trainer.n_steps:,} to {checkpoint}: continue with --resume"
        )
        raise typer.Exit(INTERRUPTED)


@contextmanager
def _stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at the first SIGINT or SIGTERM; a second one has its usual effect."""

    def handle(number: int, _: Any) -> None:
        stop()
        signal.signal(number, before[number])

    before: dict[int, Any] = {
        number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write(trainer: Trainer, out: Path, checkpoint: Path, further: Sequence[str], *, binary: bool) -> Vectors:
    """Write the vectors, so that readers see the old file or the new one. Save a checkpoint on failure."""
    try:
        vectors = trainer.vectors(further)
        vectors.save(_draft(out), binary=binary)
        with _draft(out).open("r+b") as file:
            os.fsync(file.fileno())  # the checkpoint is removed next
        _draft(out).replace(out)
    except (Exception, KeyboardInterrupt) as error:
        _draft(out).unlink(missing_ok=True)
        typer.echo(f"the vectors were not written to {out}: {error or type(error).__name__}", err=True)
        if trainer.settings.storage != "disk":  # tables on disk already have a checkpoint
            trainer.save(checkpoint)
        typer.echo(f"the training is saved to {checkpoint}: write the vectors with --resume", err=True)
        raise
    typer.echo(f"wrote {out}")
    return vectors


def _plot(trainer: Trainer, vectors: Vectors, loss_plot: Path, map_plot: Path) -> None:
    try:
        plot_loss(trainer.losses, loss_plot)
        plot_map(vectors, map_plot)
    except ImportError:
        typer.echo("no pictures: matplotlib is not installed; install it with: pip install matplotlib")
    except OSError as error:
        typer.echo(f"no pictures: {error}", err=True)
    else:
        typer.echo(f"wrote {loss_plot} and {map_plot}")
