"""
Keys that contradict each other, refused before anything is loaded. What one key alone may be, the
range behind its comment says, and configurator.py checks it.
"""
from errors import BadConfig


def check_ppo(config, terms, world_size):
    """Raise BadConfig. terms: the rewards, [(weight, name, function)]."""
    c = config
    check_common(c, terms, world_size)
    if c["kl_coef_target"] > 0 and c["kl_coef"] == 0:
        raise BadConfig(f"kl_coef_target = {c['kl_coef_target']} with kl_coef = 0: a weight of 0 "
                        "stays 0 however it adapts; type --kl_coef=0.05")
    if c["critic_warmup_iters"] >= c["max_iters"] and not c["epochs"]:
        raise BadConfig(f"critic_warmup_iters = {c['critic_warmup_iters']} of max_iters = "
                        f"{c['max_iters']}: the policy would never learn; lower it")
    if c["value_init"] == "reward" and not uses_reward_model(terms):
        raise BadConfig("value_init = 'reward', but reward_functions does not use reward_model; "
                        "type --value_init=policy")


def check_grpo(config, terms, world_size):
    """Raise BadConfig. terms: the rewards, [(weight, name, function)]."""
    c = config
    check_common(c, terms, world_size)
    names = [name for _, name, _ in terms]
    if c["batch_size"] % c["group_size"]:
        raise BadConfig(f"batch_size = {c['batch_size']} is not a multiple of group_size = "
                        f"{c['group_size']}; it counts responses, not prompts")
    if c["loss_type"] == "cispo" and (c["importance"] == "sequence" or c["dual_clip"] > 0):
        raise BadConfig("loss_type = 'cispo' has a weight a token and no clipped loss; leave "
                        "importance = 'token' and dual_clip = 0")
    if 0 < c["dual_clip"] <= 1:
        raise BadConfig(f"dual_clip = {c['dual_clip']} would stop bad tokens that are no "
                        "likelier than before; wanted 0 or more than 1")
    k1_in_loss = c["kl_coef"] > 0 and c["kl_in"] == "loss" and c["kl_estimator"] == "k1"
    if k1_in_loss and not c["kl_correction"]:
        raise BadConfig("kl_in = 'loss' with kl_estimator = 'k1' is no penalty: the gradient of "
                        "k1 is 0 on average in the first step and not the KL's in any other; "
                        "type --kl_estimator=k2 or --kl_correction=True")
    if c["kl_correction"] and c["kl_in"] == "reward":
        raise BadConfig("kl_correction is for a KL in the loss; leave it False with kl_in = "
                        "'reward'")
    if c["kl_correction"] and c["kl_estimator"] == "k2":
        raise BadConfig("kl_correction is for k1 and k3: times the ratio, k2's gradient is not "
                        "the KL's any more")
    if c["refill_by"] and c["refill_by"] not in names:
        raise BadConfig(f"refill_by = {c['refill_by']!r} is none of the rewards, which are "
                        f"{', '.join(names)}")


def check_common(c, terms, world_size):
    if 0 < c["importance_cap"] < 1:
        raise BadConfig(f"importance_cap = {c['importance_cap']} would also weaken tokens on which "
                        "sampler and training agree; wanted 0 (off), or 1 and more, such as 2")
    if c["ref_path"] and c["kl_coef"] == 0:
        raise BadConfig(f"ref_path = {c['ref_path']!r} with kl_coef = 0: there is no reference "
                        "then; type --kl_coef=0.05, or leave it out")
    if c["target_kl"] > 0 and c["staleness"] > 0 and c["importance_cap"] == 0:
        raise BadConfig("target_kl with staleness: how far the policy has moved would be counted "
                        "from the older policy that has sampled, so that the first step may "
                        "already be too far; type --importance_cap=2, which counts from now")
    if c["num_minibatches"] > c["batch_size"]:
        raise BadConfig(f"num_minibatches = {c['num_minibatches']} would leave minibatches of "
                        f"batch_size = {c['batch_size']} empty; lower it")
    if c["keep_best"] and not c["eval_path"]:
        raise BadConfig("keep_best needs held-out prompts to find the best policy by; give an "
                        "eval_path")
    check_judge(c, [name for _, name, _ in terms])
    rules = [term for term in terms if term[2]]
    if rules and world_size > 1 and c["reward_timeout"] >= c["timeout"]:
        raise BadConfig(f"reward_timeout = {c['reward_timeout']} must be below timeout = "
                        f"{c['timeout']}, or ranks that wait give up first")


def check_judge(c, names):
    """Raise BadConfig where a reward is the judge and judge_path names none that stays, or the
    other way round."""
    if "judge" not in names:
        if c["judge_path"]:
            raise BadConfig(f"judge_path = {c['judge_path']!r}, but reward_functions = "
                            f"{c['reward_functions']!r} does not use judge; type "
                            "--reward_functions=judge, or leave judge_path out")
        return
    if not c["judge_path"]:
        raise BadConfig("reward_functions names judge, and judge_path is empty; type "
                        "--judge_path=FOLDER, or --judge_path=ref_policy")
    if c["judge_path"] == "ref_policy" and not (c["kl_coef"] or c["lora"]):
        raise BadConfig("judge_path = 'ref_policy', but with kl_coef = 0 there is no reference; "
                        "give its folder, or type --kl_coef=1e-9")


def uses_reward_model(terms):
    return any(name == "reward_model" for _, name, _ in terms)
