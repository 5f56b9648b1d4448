"""
Keys of ppo.py and grpo.py that contradict each other, refused before anything is loaded. What one
key alone may be, the range behind its comment says, and configurator.py checks it.
"""
from errors import BadConfig


def check_rl(system, terms, kl_coef, batch_size, num_minibatches, target_kl, importance_cap,
             eval_path):
    """Raise BadConfig. system: the keys of the engine; terms: [(weight, name, function)]."""
    if system.ref_path and kl_coef == 0:
        raise BadConfig(f"ref_path = {system.ref_path!r} with kl_coef = 0: there is no reference "
                        "then; type --kl_coef=0.05, or leave it out")
    if target_kl > 0 and system.staleness > 0 and importance_cap == 0:
        raise BadConfig("target_kl with staleness: how far the policy has moved would be counted "
                        "from the older policy that has sampled, so that the first step may "
                        "already be too far; type --importance_cap=2, which counts from now")
    if system.sampler == "vllm" and system.staleness > 0 and importance_cap == 0:
        raise BadConfig("sampler = 'vllm' with staleness: the ratio would be to vLLM's log-probs, "
                        "which are rounded differently; type --importance_cap=2, which has the "
                        "policy itself read what an older one has sampled")
    if num_minibatches > batch_size:
        raise BadConfig(f"num_minibatches = {num_minibatches} would leave minibatches of "
                        f"batch_size = {batch_size} empty; lower it")
    if system.keep_best and not eval_path:
        raise BadConfig("keep_best needs held-out prompts to find the best policy by; give an "
                        "eval_path")
    if system.judge_path and "judge" not in [name for _, name, _ in terms]:
        raise BadConfig(f"judge_path = {system.judge_path!r}, but reward_functions does not use "
                        "judge; type --reward_functions=judge, or leave judge_path out")
    if any(function for *_, function in terms) and system.reward_timeout >= system.timeout:
        raise BadConfig(f"reward_timeout = {system.reward_timeout} must be below timeout = "
                        f"{system.timeout}, or ranks that wait give up first")


def check_grpo(batch_size, group_size, loss_type, importance, dual_clip, kl_coef, kl_in,
               kl_estimator, kl_correction):
    """Raise BadConfig where keys of grpo.py do not go together."""
    if batch_size % group_size:
        raise BadConfig(f"batch_size = {batch_size} is not a multiple of group_size = "
                        f"{group_size}; it counts responses, not prompts")
    if loss_type == "cispo" and (importance == "sequence" or dual_clip > 0):
        raise BadConfig("loss_type = 'cispo' has a weight a token and no clipped loss; leave "
                        "importance = 'token' and dual_clip = 0")
    if 0 < dual_clip <= 1:
        raise BadConfig(f"dual_clip = {dual_clip} would stop bad tokens that are no likelier than "
                        "before; wanted 0 or more than 1")
    if kl_coef > 0 and kl_in == "loss" and kl_estimator == "k1" and not kl_correction:
        raise BadConfig("kl_in = 'loss' with kl_estimator = 'k1' is no penalty: the gradient of "
                        "k1 is 0 on average in the first step and not the KL's in any other; "
                        "type --kl_estimator=k2 or --kl_correction=True")
    if kl_correction and (kl_in == "reward" or kl_estimator == "k2"):
        raise BadConfig("kl_correction is for k1 and k3 in the loss: with kl_in = 'reward' there "
                        "is no gradient, and times the ratio k2's is not the KL's any more; leave "
                        "it False")
