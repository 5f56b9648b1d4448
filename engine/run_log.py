"""
log.jsonl of a run: one JSON object a line, one line an iteration. And samples.jsonl: one line for
each response of an evaluation that is kept, so that it can be read later what earned which score.

Every line is complete, and a resumed run cuts both files back to its checkpoint: the iterations
after the checkpoint run again, and are logged again.

The key report_to shows the log in TensorBoard, Weights & Biases (wandb) or trackio as well. What
stands in log.jsonl counts: a tracker gets what has been written there, and one that fails is left
out for the rest of the run, which goes on. A run that resumes goes on in the same place: there
TensorBoard forgets the iterations after the checkpoint, and wandb keeps them (they are the same).
"""
import importlib
import json
import math
import os

from engine.together import alone, together
from errors import BadConfig, Stop, first_line, warn
from parallel import rank_and_size

LOG_FILES = "log.jsonl", "samples.jsonl"
TRACKERS = "tensorboard", "wandb", "trackio"
open_trackers = {}  # {name: (send(numbers, step), close())}, on rank 0


def write_log(out_dir, record):
    """
    A collective. Append one iteration's record, the whole line or nothing. Rank 0 writes.

    A float that is NaN or infinite becomes null, as JSON has no such numbers. Raises Stop, on all
    ranks, when the disk is full.
    """
    finite = {k: None if isinstance(x, float) and not math.isfinite(x) else x
              for k, x in record.items()}
    line = json.dumps(finite, allow_nan=False) + "\n"

    def write():
        append(os.path.join(out_dir, "log.jsonl"), line)
        send_to_trackers(finite)

    together(write if rank_and_size()[0] == 0 else lambda: None)


def write_samples(out_dir, samples):
    """
    A collective. Append an evaluation's samples to samples.jsonl: a list of dicts, whose first
    entry is the iteration. All of their lines or none. Rank 0 writes. Raises Stop like write_log.
    """
    lines = "".join(json.dumps(sample, allow_nan=False) + "\n" for sample in samples)
    file = os.path.join(out_dir, "samples.jsonl")
    together((lambda: append(file, lines)) if rank_and_size()[0] == 0 else lambda: None)


def append(file, text):
    """Write text at the end of a file; where the disk is full, the file stays as it was."""
    size = os.path.getsize(file) if os.path.exists(file) else 0
    try:
        with open(file, "a", encoding="utf-8") as f:
            f.write(text)
    except OSError as e:
        if os.path.exists(file):
            os.truncate(file, size)
        raise Stop(f"{file} cannot be written: {e.strerror}; it ends with the iteration before."
                   " Make room, and resume with the same command") from e


def read_log(out_dir, name="log.jsonl"):
    """
    [(iteration, line)] of a file of LOG_FILES, [] if there is none. A line that cannot be read, as
    a kill while writing may leave one, has the iteration None.
    """
    try:
        with open(os.path.join(out_dir, name), encoding="utf-8", errors="replace") as f:
            text = f.read()
    except FileNotFoundError:
        return []
    found = []
    for line in text.split("\n"):
        try:
            found.append((int(json.loads(line)["iteration"]), line))
        except (ValueError, KeyError, TypeError, OverflowError):
            found.append((None, line))
    return found if text else []


def cut_log(out_dir, iteration):
    """
    Delete the lines of this iteration and later ones, and lines that cannot be read, from both
    files. log.jsonl is there afterwards, if only empty. What is missing before them is said.
    """
    expected = set(range(iteration))
    for name in LOG_FILES:
        file = os.path.join(out_dir, name)
        kept = [(i, line) for i, line in read_log(out_dir, name) if i is not None and i < iteration]
        if name == "log.jsonl" or os.path.exists(file):
            with open(file + ".tmp", "w", encoding="utf-8") as f:
                f.writelines(f"{line}\n" for _, line in kept)
            os.replace(file + ".tmp", file)
            missing = sorted(expected - {i for i, _ in kept})
            if missing:
                warn(f"{file} was cut or damaged: of the iterations before {iteration} it lacks "
                     f"{len(missing)}, from {missing[0]} to {missing[-1]}, and the run goes on")
        expected = {i for i, line in kept if '"eval/' in line}  # of samples.jsonl


# --------------------------------------------------------------------------------------------------
# trackers


def start_trackers(report_to, out_dir, config, iteration):
    """
    A collective: begin to report to the trackers that report_to names, such as "wandb,tensorboard",
    from this iteration on. Rank 0 alone reports. config: the run's, which is shown with it. Raises
    BadConfig, on all ranks, where one is unknown or cannot start.
    """
    def start_all():
        run = run_id(out_dir, iteration)
        for name in names:
            if name not in TRACKERS:
                raise BadConfig(f"report_to: unknown name {name!r}; there are "
                                f"{', '.join(TRACKERS)}")
            try:
                open_trackers[name] = start_tracker(name, out_dir, config, iteration, run)
            except Exception as e:  # whatever it raises, such as that nobody is logged in
                raise BadConfig(f"report_to: {name!r} cannot start: {first_line(e)}; type pip "
                                f"install {name} if that is it, or leave it out") from e

    names = [name.strip() for name in report_to.split(",") if name.strip()]
    if names:
        alone(start_all)


def run_id(out_dir, iteration):
    """The name by which trackers know the run; one that begins anew in out_dir gets another."""
    file = os.path.join(out_dir, "report_id.txt")
    if iteration == 0 or not os.path.exists(file):
        with open(file, "w", encoding="utf-8") as f:
            f.write(f"{os.path.basename(os.path.abspath(out_dir))}-{os.urandom(4).hex()}")
    with open(file, encoding="utf-8") as f:
        return f.read().strip()


def start_tracker(name, out_dir, config, iteration, run):
    """
    Begin to report to one tracker, in out_dir/tensorboard (tensorboard --logdir=out), or in the
    project $WANDB_PROJECT or $TRACKIO_PROJECT, or else "quartet". run: its name there. Returns
    send, close.
    """
    if name == "tensorboard":
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(
            os.path.join(out_dir, "tensorboard"), purge_step=iteration)

        def add(numbers, step):
            for key, value in numbers.items():
                writer.add_scalar(key, value, step)
            writer.flush()

        return add, writer.close

    tracker, project = importlib.import_module(name), os.environ.get(f"{name.upper()}_PROJECT")
    own = dict(id=run, dir=out_dir, allow_val_change=True) if name == "wandb" else {}
    tracker.init(project=project or "quartet", name=run, config=config, resume="allow", **own)
    return (lambda numbers, step: tracker.log(numbers, step=step)), tracker.finish


def send_to_trackers(record):
    """Give the numbers of a record of log.jsonl to all trackers, as those of its iteration."""
    numbers = {key: value for key, value in record.items()
               if isinstance(value, (int, float)) and key != "iteration"}
    for name, (report, _) in list(open_trackers.items()):
        try:
            report(numbers, record["iteration"])
        except Exception as e:  # a service on the network must not end a run of many days
            warn(f"{name} has failed ({first_line(e)}); the run goes on without it")
            del open_trackers[name]


def finish_trackers():
    """Let all trackers write out what they hold."""
    for name, (_, close) in list(open_trackers.items()):
        try:
            close()
        except Exception as e:  # the run itself is over, and saved
            warn(f"{name} has failed at the end ({first_line(e)})")
    open_trackers.clear()
