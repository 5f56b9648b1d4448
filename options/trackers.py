"""
The key report_to: the log of a run also in TensorBoard, Weights & Biases (wandb) or trackio. If a
tracker fails, the run goes on without it. A run that resumes goes on in the same place: there
TensorBoard deletes the iterations after the checkpoint, and wandb keeps them (they are the same).
"""
import importlib
import math
import os
from pathlib import Path

from configurator import write_text
from errors import BadInput, first_line, say
from options.failures import package
from parallel import alone

TRACKERS = dict(tensorboard="torch.utils.tensorboard", wandb="wandb", trackio="trackio")  # modules
open_trackers = {}  # {name: (send(numbers, step), close())}, on rank 0


def names_in(report_to):
    """The trackers that the key names, such as "wandb,tensorboard". Raises BadInput."""
    names = [name.strip() for name in report_to.split(",") if name.strip()]
    for name in names:
        if name not in TRACKERS:
            raise BadInput(f"report_to: unknown name {name!r}; there are {', '.join(TRACKERS)}")
        package(name, "report_to", TRACKERS[name])
    return names


def start_trackers(report_to, out_dir, config, iteration):
    """
    A collective: begin to report to the trackers of the key, on rank 0, from this iteration on.
    config: the run's; it is shown, too. Raises BadInput where a tracker cannot start.
    """
    def start_all():
        run = run_id(out_dir, iteration)
        for name in names_in(report_to):
            try:
                open_trackers[name] = start_tracker(name, out_dir, config, iteration, run)
            except Exception as e:  # it may raise anything, such as for a missing login
                raise BadInput(f"report_to: {name!r} cannot start: {first_line(e)}; mend it, or "
                               "leave it out") from e

    alone(start_all)


def run_id(out_dir, iteration):
    """The run's name in the trackers; a new run in out_dir gets another name."""
    file = Path(out_dir, "report_id.txt")
    # a link or a pipe is not followed, but replaced: it could lead anywhere
    if iteration == 0 or file.is_symlink() or not file.is_file():
        write_text(file, f"{os.path.basename(os.path.abspath(out_dir))}-{os.urandom(4).hex()}")
    return file.read_text("utf-8").strip()


def start_tracker(name, out_dir, config, iteration, run):
    """
    (send, close) of one tracker, which reports in out_dir/tensorboard (tensorboard --logdir=out),
    or in the project $WANDB_PROJECT or $TRACKIO_PROJECT, or else "quartet". run: its name there.
    """
    tracker = importlib.import_module(TRACKERS[name])
    if name == "tensorboard":
        writer = tracker.SummaryWriter(os.path.join(out_dir, "tensorboard"), purge_step=iteration)

        def add(numbers, step):
            for key, value in numbers.items():
                writer.add_scalar(key, value, step)
            writer.flush()

        return add, writer.close

    project = os.environ.get(f"{name.upper()}_PROJECT") or "quartet"
    own = dict(id=run, dir=out_dir, allow_val_change=True) if name == "wandb" else {}
    tracker.init(project=project, name=run, config=config, resume="allow", **own)
    return (lambda numbers, step: tracker.log(numbers, step=step)), tracker.finish


def send_to_trackers(record):
    """Send the finite numbers of a record to all trackers, with its iteration."""
    numbers = {key: value for key, value in record.items()
               if isinstance(value, (int, float)) and math.isfinite(value) and key != "iteration"}
    call_all(0, numbers, record["iteration"])


def finish_trackers():
    call_all(1)


def call_all(which, *args):
    """Call each tracker's send or close. A service on the network must not end a run of days."""
    for name, functions in list(open_trackers.items()):
        try:
            functions[which](*args)
        except Exception as e:
            say(f"{name} has failed ({first_line(e)}); the run goes on without it")
            del open_trackers[name]
