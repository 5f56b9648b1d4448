"""
The clinic of lesson 8: small runs, each with one hidden fault, or none.

    python course/clinic.py            # makes out/clinic with six patients
    python course/clinic.py --seed=2   # others
    python course/clinic.py --faults=2 # some patients have two faults

Read lesson8.md, and no further here: FAULTS below has all of them.
"""
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [path for path in (ROOT, f"{ROOT}/data") if path not in sys.path]

from byte_tokenizer import write_byte_tokenizer  # noqa: E402

from configurator import configure, read_json, write_json, write_text  # noqa: E402
from errors import BadInput  # noqa: E402

# -------------------------------------------------------------------------------------------------
out_dir = "out/clinic"  # the patients, and the small toy that they share
seed = 1  # which faults, and in which order [>= 0]
patients = 6  # how many [1..10]
faults = 1  # the largest number of faults in a patient [1..2]
tries = 5  # runs of a patient, until its symptoms can be seen [1..20]
config, _ = configure(globals(), argv=None if __name__ == "__main__" else [])
# -------------------------------------------------------------------------------------------------
# a toy that learns in seconds: sums of two numbers from 0 to 4. Three of ten demonstrations think
# first, and these are right; of the others few are

RIGHT = "float(text.split('</think>')[-1] == row['answer'])"
REWARDS = dict(  # the score of a text; all have one name, so that the logs do not tell
    right=f"[{RIGHT} for text, row in zip(texts, rows)]",
    longer="[len(text) / 10 for text in texts]",
    nothing="[random.Random(text + str(i)).random() for i, text in enumerate(texts)]",
    two="[float(text == '2') for text in texts]",
    other_rows=f"[{RIGHT} for text, row in zip(sorted(texts, key=len), rows)]")
SFT = dict(out_dir="sft", tokenizer_path="tokenizer", device_type="cpu", dtype="float64",
           d_model=32, n_head=2, d_ff=64, context=32, max_iters=150, batch_size=32,
           learning_rate=1e-2, train_path="sft.jsonl")
# in float64 other machines, which round otherwise, sample the same texts
KEYS = dict(device_type="cpu", dtype="float64", policy_path="sft/policy", eval_interval=100,
            prompts_path="rl.jsonl", eval_path="rl.jsonl", eval_size=0, batch_size=64,
            micro_batch_size=64, max_new_tokens=12, temperature=1.0, kl_coef=0.05, max_iters=3,
            learning_rate=3e-3, lr_decay="constant", missing_eos_penalty=0.0, num_minibatches=2,
            reward_functions="mine.py:score", checkpoint_interval=0)
PPO = KEYS | dict(script="ppo.py", value_init="policy", ppo_epochs=2)
GRPO = KEYS | dict(script="grpo.py", num_iterations=2)
BOTH = PPO, GRPO
# letter: scripts; keys by a size, drawn from 0.5 to 2; reward; a wrong line (file, old, new);
# lesson8.md has the letters' meanings
FAULTS = {
    "A": (BOTH, lambda size: {}, "right", None),
    "B": (BOTH, lambda size: dict(learning_rate=0.3 * size), "right", None),
    "C": (BOTH, lambda size: dict(learning_rate=3e-6 * size), "right", None),
    "D": (BOTH, lambda size: {}, "nothing", None),
    "E": ([GRPO], lambda size: dict(learning_rate=1e-2, kl_coef=1e-9), "two", None),
    "F": ([PPO], lambda size: dict(kl_coef=0.3 * size, max_iters=4), "right", (
        "ppo.py", "rewards = -kl_coef * kl", "rewards = kl_coef * kl")),
    "G": (BOTH, lambda size: {}, "other_rows", None),
    "H": ([GRPO], lambda size: {}, "right", (
        "grpo.py", 'logprobs, mb["old_logprobs"], mb', "logprobs, logprobs.detach(), mb")),
    "I": ([PPO], lambda size: {}, "right", (
        "ppo.py", "parallel.zero_gradients(gradients)", "pass")),
    "J": ([PPO], lambda size: dict(kl_coef=100.0 * size), "right", None),
    "K": ([PPO], lambda size: dict(kl_coef=1e-9, max_iters=4), "longer", None),
}
# a wrong reward, and a fault of the update that can be seen beside it
PAIRS = ["".join(sorted(a + b)) for a in "DG" for b in "BCFHIJ"]
# what lesson8.md says of a log: first and last record, scores and accuracies of the samples
SYMPTOMS = {
    "A": lambda first, last, samples: last["objective/kl"] > 0.01 and not any(
        SYMPTOMS[x](first, last, samples) for x in "BCDEFGJ"),
    "B": lambda first, last, samples: last["objective/kl"] > 3,
    "C": lambda first, last, samples: abs(last["objective/kl"]) < 1e-3,
    "D": lambda first, last, samples: any(score not in (0, 1) for score, _ in samples),
    "E": lambda first, last, samples: last["objective/scores"] > last["objective/accuracy"] + 0.1,
    "F": lambda first, last, samples: last.get("objective/non_score_reward", 0) > 1e-3,
    "G": lambda first, last, samples: sum(a != b for a, b in samples) > 0.1 * len(samples),
    "H": lambda first, last, samples: last["policy/clipfrac"] == 0,
    "I": lambda first, last, samples:
        last.get("val/grad_norm", 0) > 1.5 * first.get("val/grad_norm", 0),
    "J": lambda first, last, samples:
        abs(last.get("objective/non_score_reward", 0)) > 10 * abs(last["objective/kl"]) > 0,
    "K": lambda first, last, samples: last["objective/length"] > first["objective/length"] + 1,
}


def write_reward(folder, kind="right"):
    write_text(f"{folder}/mine.py", "import random\n\n\ndef score(batch):\n    texts, rows = "
               f"batch['completions'], batch['rows']\n    return {REWARDS[kind]}\n")


def write_lines(file, lines):
    write_text(file, "".join(json.dumps(line) + "\n" for line in lines))


def write_toy(folder):
    """The small toy's tokenizer, rewards and rows, in a folder."""
    drawn = random.Random(0)
    write_byte_tokenizer(f"{folder}/tokenizer", ["<think>", "</think>"])
    write_reward(folder)
    rows = [dict(prompt=f"{a}+{b}=", answer=str(a + b)) for a in range(5) for b in range(5)]
    demonstrations = []
    for row in rows * 40:
        thought = f"<think>{row['prompt'][:3]}</think>" if drawn.random() < 0.3 else ""
        right = drawn.random() < (0.95 if thought else 0.2)
        said = row["answer"] if right else str(drawn.randrange(9))
        demonstrations.append(dict(prompt=row["prompt"], completion=thought + said))
    write_lines(f"{folder}/rl.jsonl", rows)
    write_lines(f"{folder}/sft.jsonl", demonstrations)


def copy_program(folder, wrong):
    """A copy of quartet in a folder, in which one line (file, old, new) is wrong."""
    shutil.copytree(ROOT, folder, ignore=lambda path, names: [
        name for name in names if path == ROOT and not (
            name.endswith(".py") or name in ("config", "options", "grading"))])
    file, old, new = wrong
    with open(f"{folder}/{file}", encoding="utf-8") as f:
        source = f.read()
    assert source.count(old) == 1, (file, old)
    write_text(f"{folder}/{file}", source.replace(old, new))


def train(program, keys, folder, out):
    """Run a script of a program, a folder with quartet's files, on the toy."""
    argv = [f"--{name}={value}" for name, value in (keys | dict(out_dir=out)).items()
            if name != "script"]
    script = keys["script"]
    done = subprocess.run([sys.executable, os.path.abspath(f"{program}/{script}"), *argv],
                          cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"clinic.py: {script} has ended with an error:\n{done.stdout}")


def patients_of(number, count, faults=1):
    """A str of letters for each patient. One at least has a wrong line; one has `faults` faults."""
    drawn = random.Random(number)
    with_line = {letter for letter in FAULTS if FAULTS[letter][-1]}
    while True:
        found = drawn.sample([*FAULTS] + PAIRS * (faults > 1), count)
        if with_line & {*"".join(found)} and max(map(len, found)) == faults:
            return found


def runs_of(number, patient, letters):
    """The keys of a patient's run, again and again: until the symptoms can be seen."""
    drawn = random.Random(f"{number} {patient}")
    scripts = [keys for keys in BOTH if all(keys in FAULTS[letter][0] for letter in letters)]
    while True:
        keys = drawn.choice(scripts) | dict(seed=drawn.randrange(1000),
                                            max_iters=drawn.choice((3, 4)))
        for letter in letters:
            keys |= FAULTS[letter][1](2.0**drawn.uniform(-1, 1))
        yield keys


def sealed(number, patient, letter):
    """A patient's letter, so that a glance at key.json does not tell it."""
    return hashlib.sha256(f"{number} {patient} {letter}".encode()).hexdigest()


def lines_of(file):
    with open(file, encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def records(folder):
    return [record for record in lines_of(f"{folder}/log.jsonl") if "objective/scores" in record]


def shows(letters, folder):
    """Whether the log and the samples of a run have the symptoms of these letters."""
    samples = [(line["scores"]["reward/score"], line["scores"]["accuracy"])
               for line in lines_of(f"{folder}/samples.jsonl")]
    return all(SYMPTOMS[letter](records(folder)[0], records(folder)[-1], samples)
               for letter in letters)


def write_page(folder, count, faults):
    """clinic.html: the curves and samples of all patients; a click on a letter is a diagnosis."""
    with open(f"{ROOT}/course/lesson8.md", encoding="utf-8") as f:
        letters = dict(re.findall(r"(?m)^\| ([A-Z]) \| (.*) \|$", f.read()))
    rows = []
    for patient in range(1, count + 1):
        samples = lines_of(f"{folder}/patient_{patient}/samples.jsonl")
        found = records(f"{folder}/patient_{patient}")
        names = [name for name, x in found[0].items() if isinstance(x, (int, float))
                 and name.startswith(("objective/", "policy/", "val/", "loss/"))]
        rows.append(dict(
            curves={name: [record.get(name) for record in found] for name in sorted(names)},
            samples=[[x["prompt"], x["text"], x["scores"]["reward/score"]]
                     for x in samples[:4] + samples[-8:]]))
    data = json.dumps(dict(patients=rows, letters=letters, faults=faults)).replace("<", "\\u003c")
    with open(f"{ROOT}/course/clinic.html", encoding="utf-8") as f:
        write_text(f"{folder}/clinic.html", f.read().replace("DATA", data))


def read_answers(file, patients, faults=1):
    """{patient: letters} of answers.txt; raises BadInput with the line that is none."""
    answers = {}
    with open(file, encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            found = re.fullmatch(rf"(\d+)\s+([A-Za-z]{{1,{faults}}})", line.strip())
            letters = "".join(sorted({*found[2].upper()})) if found else ""
            if line.strip() and not (found and found[1] in patients and {*letters} <= {*FAULTS}):
                raise BadInput(f"{file}, line {number}: {line.strip()!r}; wanted are a patient "
                               f"from 1 to {len(patients)}, a space and a letter from A to "
                               f"{max(FAULTS)}{' (or two)' * (faults > 1)}, and nothing else, such "
                               f"as: 1 {'CG'[:faults]}")
            if found and found[1] in answers:
                raise BadInput(f"{file}, line {number}: patient {found[1]} has two lines")
            if found:
                answers[found[1]] = letters
    return answers


def check_answers(folder=out_dir):
    """Print how many of answers.txt are right, and whether the program is mended; True if all."""
    if not os.path.exists(f"{folder}/key.json"):
        sys.exit("check.py: there are no patients yet; type: python course/clinic.py")
    key = read_json(f"{folder}/key.json")
    if not os.path.exists(f"{folder}/answers.txt"):
        sys.exit(f"check.py: write {folder}/answers.txt, a line for each patient, such as: 1 A")
    answers = read_answers(f"{folder}/answers.txt", key["sealed"], key["faults"])
    right = sum(sealed(key["seed"], patient, answers.get(patient)) == found
                for patient, found in key["sealed"].items())
    print(f"lesson 8: {right} of {len(key['sealed'])} are right")
    shutil.rmtree(f"{folder}/mended", ignore_errors=True)
    train(f"{folder}/program", key["mend"], folder, "mended")
    mended, sound = records(f"{folder}/mended")[-1], key["sound"]
    good = all(abs(mended[name] - x) < 1e-6 for name, x in sound.items())
    print(f"lesson 8: {folder}/program, of patient {key['patient']}, is " + (
        "mended" if good else "not mended: its last iteration differs from that of quartet's own"))
    return good and right == len(key["sealed"])


if __name__ == "__main__":
    inside = {*os.listdir(out_dir)} if os.path.isdir(out_dir) else set()
    if inside and not {"mine.py", "sft.jsonl"} <= inside:
        raise BadInput(f"out_dir = {out_dir!r} is no clinic, and would be deleted; choose another "
                       "--out_dir")
    shutil.rmtree(out_dir, ignore_errors=True)
    os.makedirs(out_dir)
    write_toy(out_dir)
    print("SFT of a small toy", flush=True)
    train(ROOT, SFT | dict(script="sft.py"), out_dir, "sft")
    everyone = patients_of(seed, patients, faults)
    for patient, letters in enumerate(everyone, 1):
        room, program = f"{out_dir}/patient_{patient}", ROOT
        rewards, wrong = ([x for x in column if x not in ("right", None)] for column in zip(
            *(FAULTS[letter][2:] for letter in letters), strict=True))
        if wrong:
            program = f"{out_dir}/program"
            shutil.rmtree(program, ignore_errors=True)
            copy_program(program, wrong[0])
        write_reward(out_dir, *rewards)
        for _, keys in zip(range(tries), runs_of(seed, patient, letters), strict=False):
            train(program, keys, out_dir, "run")
            os.makedirs(room, exist_ok=True)
            for name in ("log.jsonl", "samples.jsonl"):  # no settings: these two must tell
                shutil.copy(f"{out_dir}/run/{name}", room)
            shutil.rmtree(f"{out_dir}/run")
            if shows(letters, room):
                break
        if wrong:
            key = dict(seed=seed, faults=faults, patient=patient, mend=keys)
        write_lines(f"{room}/log.jsonl", [
            {name: x for name, x in line.items() if not name.endswith("/lr")}
            for line in lines_of(f"{room}/log.jsonl")])
        print(f"patient {patient}: {room}", flush=True)
    write_reward(out_dir)
    train(ROOT, key["mend"], out_dir, "sound")
    names = "objective/scores", "objective/kl", "loss/policy", "policy/grad_norm"
    key["sound"] = {name: records(f"{out_dir}/sound")[-1][name] for name in names}
    shutil.rmtree(f"{out_dir}/sound")
    key["sealed"] = {str(patient): sealed(seed, patient, letters)
                     for patient, letters in enumerate(everyone, 1)}
    write_json(f"{out_dir}/key.json", key)
    write_page(out_dir, patients, faults)
    print(f"\nOpen {out_dir}/clinic.html in a browser, or read the logs, and write "
          f"{out_dir}/answers.txt, a line for each patient, such as: 1 {'CG'[:faults]}\nThe "
          f"program of patient {key['patient']} is in {out_dir}/program: mend its line.\n"
          "Then: python course/check.py 8")
