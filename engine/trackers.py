"""
TensorBoard, Weights & Biases (wandb) and trackio: where a run's log is shown as well, if the key
report_to asks for it. log.jsonl is what counts: a tracker gets what has been written there, and one
that fails is left out for the rest of the run, which goes on.

A run that resumes goes on in the same place. It repeats the iterations after its checkpoint:
TensorBoard forgets those of before, and wandb keeps them (they are the same numbers).
"""
import importlib
import os

from engine.together import alone
from errors import BadConfig, first_line, warn

KNOWN = "tensorboard", "wandb", "trackio"
open_trackers = {}  # {name: (send(numbers, step), close())}, on rank 0


def start_trackers(report_to, out_dir, config, iteration):
    """
    A collective: begin to report to the trackers that report_to names, such as "wandb,tensorboard",
    from this iteration on. Rank 0 alone reports. config: the run's, which is shown with it. Raises
    BadConfig, on all ranks, where one is unknown or cannot start.
    """
    def start_all():
        run = run_id(out_dir, iteration)
        for name in names:
            if name not in KNOWN:
                raise BadConfig(f"report_to: unknown name {name!r}; there are {', '.join(KNOWN)}")
            try:
                open_trackers[name] = start(name, out_dir, config, iteration, run)
            except ImportError as e:
                raise BadConfig(f"report_to: {name!r} is not installed here ({first_line(e)}); "
                                f"type pip install {name}, or leave it out") from e
            except Exception as e:  # whatever it raises, such as that nobody is logged in
                raise BadConfig(f"report_to: {name!r} cannot start: {first_line(e)}; see to it, or "
                                "leave it out") from e

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


def start(name, out_dir, config, iteration, run):
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


def send(record):
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
