"""
TensorBoard, Weights & Biases (wandb) and trackio: where a run's log is shown as well, if the key
report_to asks for it. log.jsonl is what counts: a tracker gets what has been written there, and one
that fails is left out for the rest of the run, which goes on.

A run that resumes goes on in the same place. It repeats the iterations after its checkpoint:
TensorBoard forgets those of before, and wandb keeps them (they are the same numbers).
"""
import difflib
import importlib
import os

from engine.together import alone
from errors import BadConfig, first_line, warn

open_trackers = {}  # {name: (send, close)}, on rank 0


def start_trackers(report_to, out_dir, config, iteration):
    """
    A collective: begin to report to the trackers that report_to names, such as "wandb,tensorboard",
    from this iteration on. Rank 0 alone reports. config: the run's, which is shown with it. Raises
    BadConfig, on all ranks, where one is unknown or cannot start.
    """
    names = [name.strip() for name in report_to.split(",") if name.strip()]
    if names:
        alone(lambda: open_all(names, out_dir, config, iteration))


def open_all(names, out_dir, config, iteration):
    global open_trackers
    open_trackers = {}
    name_of_run = run_id(out_dir, iteration)
    for name in names:
        if name not in STARTS:
            near = difflib.get_close_matches(name, STARTS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(STARTS)}"
            raise BadConfig(f"report_to: unknown name {name!r}; {hint}")
        try:
            open_trackers[name] = STARTS[name](out_dir, config, iteration, name_of_run)
        except ImportError as e:
            raise BadConfig(f"report_to: {name!r} is not installed here ({first_line(e)}); type "
                            f"pip install {name}, or leave it out") from e
        except Exception as e:  # whatever it raises, such as that nobody is logged in
            raise BadConfig(f"report_to: {name!r} cannot start: {first_line(e)}; see to it, or "
                            "leave it out") from e


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


# --------------------------------------------------------------------------------------------------
# one function a tracker: (out_dir, config, iteration, name of the run) -> (send, close)


def start_tensorboard(out_dir, config, iteration, name):
    """Files in out_dir/tensorboard: tensorboard --logdir=out"""
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(
        os.path.join(out_dir, "tensorboard"), purge_step=iteration)

    def report(numbers, step):
        for key, value in numbers.items():
            writer.add_scalar(key, value, step)
        writer.flush()

    return report, writer.close


def start_wandb(out_dir, config, iteration, name):
    """A run of the project $WANDB_PROJECT, or else quartet."""
    wandb = importlib.import_module("wandb")
    wandb.init(project=os.environ.get("WANDB_PROJECT", "quartet"), id=name, name=name,
               dir=out_dir, config=config, resume="allow", allow_val_change=True)
    return (lambda numbers, step: wandb.log(numbers, step=step)), wandb.finish


def start_trackio(out_dir, config, iteration, name):
    """A run of the project $TRACKIO_PROJECT, or else quartet."""
    trackio = importlib.import_module("trackio")
    trackio.init(project=os.environ.get("TRACKIO_PROJECT", "quartet"), name=name, config=config,
                 resume="allow")
    return (lambda numbers, step: trackio.log(numbers, step=step)), trackio.finish


STARTS = dict(tensorboard=start_tensorboard, wandb=start_wandb, trackio=start_trackio)


def run_id(out_dir, iteration):
    """
    The name under which wandb and trackio know this run: out_dir's own and a random part. It is
    kept in out_dir/report_id.txt for a run that resumes; one that begins anew gets another.
    """
    file = os.path.join(out_dir, "report_id.txt")
    if iteration == 0 or not os.path.exists(file):
        with open(file, "w", encoding="utf-8") as f:
            f.write(f"{os.path.basename(os.path.abspath(out_dir))}-{os.urandom(4).hex()}")
    with open(file, encoding="utf-8") as f:
        return f.read().strip()
