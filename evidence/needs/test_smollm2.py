"""
Two iterations of SmolLM2-135M-Instruct, where its folder is: $SMOLLM2, or out/smollm2 of
data/gsm_symbolic/model_from_wheel.py.

    python -m pytest evidence/needs/test_smollm2.py
"""
import os
import signal

import pytest
import torch
from tiny import ROOT, Started, assert_same_run, at, jsonl, read_jsonl, typed, write

FOLDER = os.environ.get("SMOLLM2", f"{ROOT}/out/smollm2")
pytestmark = pytest.mark.skipif(not os.path.isdir(FOLDER), reason=f"there is no {FOLDER}")

CHATS = [dict(prompt=[dict(role="user", content=f"What is {n} + {n + 3}?")]) for n in range(9)]
RULE = "def rule(batch): return [len(text) for text in batch['completions']]"


def grpo(folder, rows, **how):
    """Two iterations of 8 responses of the real model; the longer ones score more."""
    rule = write(f"{folder}.py", RULE)
    keys = dict(out_dir="out", policy_path=FOLDER, prompts_path=rows, device_type="cpu",
                max_iters=2, batch_size=8, group_size=4, max_new_tokens=6, checkpoint_interval=1,
                micro_batch_size=4, learning_rate=1e-5, reward_functions=f"{rule}:rule")
    return Started("grpo.py", typed(keys), folder, **how).wait(900)


def test_real_weights(tmp_path):
    """
    Two iterations; killed in the second and resumed: the same bits; the first one on two ranks is
    the same, to rounding; transformers reads what is saved.
    """
    import transformers

    rows = jsonl(tmp_path / "rows.jsonl", CHATS)
    folders = [str(tmp_path / name) for name in ("whole", "killed", "two")]
    assert grpo(folders[0], rows).codes == [0]
    assert grpo(folders[1], rows, before=at(1, signal.SIGKILL)).codes == [-signal.SIGKILL]
    assert grpo(folders[1], rows).codes == [0]
    assert_same_run(*(f"{folder}/out" for folder in folders[:2]))
    assert grpo(folders[2], rows, ranks=2).codes == [0, 0]
    log, of_two = (read_jsonl(f"{folder}/out/log.jsonl") for folder in folders[::2])
    assert of_two[0]["objective/texts"] == log[0]["objective/texts"]
    for key in ("objective/entropy", "policy/grad_norm", "loss/kl"):
        assert of_two[0][key] == pytest.approx(log[0][key], rel=1e-3, abs=1e-6)
    assert all(0 < record["policy/sampler_gap"] < 1e-4 for record in log[:2])
    assert log[0]["objective/kl"] == 0 < log[1]["policy/grad_norm"]

    policy = f"{folders[0]}/out/policy"
    model = transformers.AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    start = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    moved = max((a - b).abs().max().item() for a, b in
                zip(model.parameters(), start.parameters(), strict=True))
    assert 1e-7 < moved <= 1.01 * 2e-5  # two steps of Adam
    tokenizer = transformers.AutoTokenizer.from_pretrained(policy)
    turn = tokenizer.apply_chat_template(CHATS[0]["prompt"] + [dict(role="assistant", content="3")],
                                         tokenize=False)
    assert turn.endswith("<|im_start|>assistant\n3<|im_end|>\n")
    ends = model.generation_config.eos_token_id
    assert tokenizer.decode(ends) == "<|im_end|>" == tokenizer.eos_token
