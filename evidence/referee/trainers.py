"""
What other trainers compute: a function of a wheel (cut.py) for each, which returns {formula: what
it computes of a batch}, or with the names of the choices by which that differs from quartet.
"""
from types import SimpleNamespace as Given

import torch

from evidence.referee.ours import (CAP, EPS, G, GAMMA, HIGH, LAM, LOW, STEPS, T, graded,
                                   per_token)

# {name of a choice: (keywords of ours.py's function, what it is)}
CHOICES = {
    "n - 1": (dict(minus=1), "variances are divided by n - 1; in quartet's whitening by n"),
    "eps 1e-5": (dict(epsilon=1e-5), "added to a deviation or a mean; in quartet 1e-4, as in TRL"),
    "eps 1e-6": (dict(epsilon=1e-6), "the same"),
    "eps 1e-9": (dict(epsilon=1e-9), "the same; it is less than the rounding of float32, by which "
                 "the deviation of equal scores is not 0"),
    "std + 1e-5": (dict(outside=1e-5), "in the place of sqrt(variance + 1e-8)"),
    "KL <= 10": (dict(most=10), "an estimate beyond 10 nats is cut, and its gradient is 0"),
    "dual clip 3": (dict(dual=True), "is always on"),
    "mean of rows": (dict(rows=True), "a mean over rows of means over tokens: a token of a short "
                     "row counts more"),
    "token-mean": (dict(kind="token-mean"), "all tokens weigh the same; the paper has a mean "
                   "over responses (2507.18071, eq. 5)"),
    "gaps are 0": (dict(steps="empty"), "a gap is steps of value 0: so the token before it has "
                   "V = 0 as its next state (1506.02438, eq. 16), and lam fades over it"),
    "reads padding": (dict(steps="all"), "rewards and values of padding and gaps are in the sums: "
                      "right if the caller has set them to 0, and there are no gaps (the same)"),
    "cut: + value": (dict(cut=True), "a response that fills its row gets the value behind it; in "
                     "quartet that is 0"),
    "empty rows": (dict(empty=True), "a row without tokens is one of the n of a mean over rows")}


def tokens(of):
    """The numbers (B, T) that of(batch) gives, at the tokens."""
    return lambda b: of(b)[b.mask]


def rows(of):
    """The numbers (B,) that of(batch) gives, at each token of their rows."""
    return lambda b: per_token(b, of(b))


def loss(of, at="logprobs"):
    """The loss of(batch, x) and its gradient: x takes the place of the tensor b.AT."""
    return lambda b: graded(lambda x: of(b, x), b, at)


def each(kinds, kl, *choices):
    """Estimates of the KL, by a function of (log-probs, the reference's, kind)."""
    def mean(kind):
        return loss(lambda b, x: kl(x, b.ref, kind)[b.mask].double().mean())

    return {kind: (mean(kind), *choices) for kind in kinds.split()}


def verl(w):
    c, f = w["verl/trainer/ppo/core_algos.py"], w["verl/utils/torch_functional.py"]
    correction = w["verl/trainer/ppo/rollout_corr_helper.py"]

    def advantage(name, **keys):
        return tokens(lambda b: getattr(c, f"compute_{name}_outcome_advantage")(
            b.last * b.scores[:, None], b.m, index=b.index, **keys)[0])

    def policy(name, kind="token-mean", low=LOW, high=HIGH):
        config = Given(clip_ratio=EPS, clip_ratio_low=low, clip_ratio_high=high,
                       global_batch_info={}, get=lambda key, default: 3.0)
        return loss(lambda b, x: getattr(c, f"compute_policy_loss_{name}")(
            b.old, x, b.advantages, b.m, kind, config, None)[0])

    def length(b):
        buffer = Given(enable=True, len=20, penalty_factor=1.0, log=False)
        return torch.tensor([w["verl/experimental/reward_loop/reward_manager/dapo.py"].lines(
            "reward = ", "if self.overlong", score=0.0, valid_response_length=n,
            self=Given(max_resp_len=100, overlong_buffer_cfg=buffer)).reward for n in STEPS])

    def mean(kind, **keys):
        return loss(lambda b, x: c.agg_loss(x, b.m, kind, **keys))

    return {
        # it whitens the advantages, but not the returns
        "GAE, with gaps": tokens(lambda b: c.compute_gae_advantage_return(
            b.rewards, b.values, b.m, GAMMA, LAM)[1] - b.values),
        "whitening": (tokens(lambda b: f.masked_whiten(b.rewards, b.m)), "n - 1"),
        **each("k1 k2", lambda *x: c.kl_penalty(*x)),
        **each("k3", lambda *x: c.kl_penalty(*x), "KL <= 10"),
        "clipped loss": (policy("vanilla", high=LOW), "dual clip 3"),
        "value loss": loss(lambda b, x: c.compute_value_loss(
            x, b.rewards, b.old_values, b.m, EPS)[0], "values"),
        "GRPO": (advantage("grpo"), "eps 1e-6"), "RLOO": advantage("rloo"),
        "Dr. GRPO": advantage("grpo", norm_adv_by_std_in_grpo=False),
        "token-mean": mean("token-mean"), "seq-mean-token-mean": mean("seq-mean-token-mean"),
        "seq-mean-token-sum-norm": mean(
            "seq-mean-token-sum-norm", loss_scale_factor=2 * T, global_batch_size=3 * G),
        "GSPO": policy("gspo", "seq-mean-token-mean"), "CISPO": policy("cispo", low=1.0),
        "importance weights": tokens(lambda b: correction.compute_rollout_correction_weights(
            b.old - b.sampler, b.m, "token", CAP)[0]),
        "DAPO's length": length}


def openrlhf(w):
    m, u = w["openrlhf/models/loss.py"], w["openrlhf/models/utils.py"]
    folder = "openrlhf/trainer/ppo_utils/"
    maker = w[folder + "experience_maker.py"]

    def advantage(name):
        args = Given(algo=Given(advantage=Given(estimator=name)),
                     rollout=Given(n_samples_per_prompt=G))
        return rows(lambda b: maker.lines(
            "if args.algo.advantage.estimator == 'rloo'", "if args.", args=args,
            rewards=b.scores.view(-1, G)).rewards.flatten())

    def white(b):
        begin = "if args.algo.advantage.estimator in ['gae', 'reinforce', 'reinforce_b"
        args = Given(algo=Given(advantage=Given(estimator="gae", no_std_norm=False)))
        one = Given(advantages=b.rewards, action_mask=b.mask)
        maker.lines(begin, begin, args=args, experiences=[one])
        return one.advantages

    def gae(b):
        return maker.method("RemoteExperienceMaker.get_advantages_and_returns")(
            None, b.values, b.rewards, b.m, GAMMA, LAM)[0]

    def policy(high, **keys):
        return loss(lambda b, x: m.PolicyLoss(clip_eps_high=high, **keys)(
            x, b.old, b.advantages, b.m)[0])

    def weights(b):  # by the gradient of a ratio of 1 with an advantage of -1
        made = m.PolicyLoss(is_correction_level="token", is_correction_mode="clip",
                            is_correction_threshold=(0.0, CAP))
        x = b.old.clone().requires_grad_()
        made(x, b.old, -torch.ones_like(x), b.m, b.sampler)[0].backward()
        return x.grad * b.mask.sum()

    def length(b):
        made = Given(response_length=torch.tensor(STEPS), rewards=torch.zeros(5))
        w[folder + "length_penalty.py"].apply_overlong_penalty([made], 100, 20)
        return made.rewards

    return {
        "GAE, with gaps": (tokens(gae), "gaps are 0"), "whitening": tokens(white),
        **each("k1 k2 k3", lambda x, ref, kind: u.compute_approx_kl(x, ref, kl_estimator=kind),
               "KL <= 10"),
        "clipped loss": policy(LOW), "GSPO": policy(HIGH, policy_loss_type="gspo"),
        "value loss": loss(lambda b, x: m.ValueLoss(EPS)(
            x, b.old_values, b.rewards, b.m), "values"),
        "GRPO": (advantage("group_norm"), "eps 1e-9"), "Dr. GRPO": advantage("dr_grpo"),
        "RLOO": advantage("rloo"), "token-mean": loss(lambda b, x: m.aggregate_loss(x, b.m)),
        "seq-mean-token-mean": loss(lambda b, x: m.aggregate_loss(x, b.m, False)),
        "importance weights": tokens(weights), "DAPO's length": length}


def skyrl(w):
    folder = "skyrl/backends/skyrl_train/utils/"
    p, correction = w[folder + "ppo_utils.py"], w[folder + "off_policy_correction_utils.py"]

    def advantage(name, **keys):
        return tokens(lambda b: getattr(p, f"compute_{name}_outcome_advantage")(
            token_level_rewards=b.last * b.scores[:, None], response_mask=b.m, index=b.index,
            **keys)[0])

    def scaled(b, x, kind):  # it divides advantages, and then adds up losses
        return p.apply_loss_reduction_to_advantages_minibatch(
            x.clone(), b.m, kind, 1, 2 * T, [(i, i + G) for i in range(0, len(b.m), G)])

    def mean(kind):
        return loss(lambda b, x: p.reduce_loss(x * scaled(b, torch.ones_like(b.m), kind), b.m))

    def policy(name, kind="token_mean", high=HIGH):
        config = Given(eps_clip_low=LOW, eps_clip_high=high, policy_loss_type="regular",
                       clip_ratio_c=3.0, loss_reduction="sequence_mean", off_policy_correction=None,
                       cispo=Given(cispo_eps_clip_low=1.0, cispo_eps_clip_high=HIGH))
        return loss(lambda b, x: getattr(p, name)(
            x, b.old, scaled(b, b.advantages, kind), config, b.m)[0])

    return {
        "GAE, with gaps": (tokens(lambda b: p.compute_gae_advantage_return(
            b.rewards, b.values, b.m, GAMMA, LAM)[1] - b.values), "reads padding"),
        "whitening": (tokens(lambda b: p.masked_whiten(b.rewards, b.m)), "n - 1"),
        **each("k1 k2", lambda x, ref, kind: p.compute_approx_kl(x, ref, None, kind)),
        **each("k3", lambda x, ref, kind: p.compute_approx_kl(x, ref, None, kind), "KL <= 10"),
        "clipped loss": policy("ppo_policy_loss", high=LOW),
        "value loss": (loss(lambda b, x: p.ppo_critic_loss(
            x, b.old_values, b.rewards, Given(value_clip=EPS), b.m)[0], "values"), "mean of rows"),
        "GRPO": (advantage("grpo"), "eps 1e-6"), "RLOO": advantage("rloo"),
        "Dr. GRPO": advantage("grpo", grpo_norm_by_std=False), "token-mean": mean("token_mean"),
        "seq-mean-token-mean": (mean("sequence_mean"), "empty rows"),
        "seq-mean-token-sum-norm": mean("seq_mean_token_sum_norm"),
        "GSPO": policy("gspo_policy_loss", "sequence_mean"),
        "CISPO": policy("compute_policy_loss_cispo"),
        "importance weights": tokens(lambda b: correction.compute_tis_ratio(
            b.old, b.sampler, b.m, "token", Given(token_tis_ratio_clip_high=CAP))[0])}


def areal(w):
    f, data = w["areal/utils/functional/functional.py"], w["areal/utils/data.py"]

    def norm(mean="group", std=None, size=G, others=False):
        return data.Normalization(Given(mean_level=mean, mean_leave1out=others, std_level=std,
                                        std_unbiased=True, group_size=size, eps=1e-5))

    def advantage(**keys):
        return rows(lambda b: norm(**keys)(b.scores))

    def gae(b):
        wide = [torch.cat([x, b.old_values[:, :1]], 1) for x in (b.rewards, b.values, b.m)]
        return w["areal/trainer/ppo/actor.py"].lines(
            "advantages_reversed = ", "advantages = ", rewards=wide[0], values=wide[1],
            loss_mask=wide[2], bs=len(b.m), max_seqlen=T + 1, seq_no_eos_mask=b.mask[:, -1],
            self=Given(discount=GAMMA, gae_lambda=LAM)).advantages[:, :T]

    def policy(**keys):
        return loss(lambda b, x: f.ppo_actor_loss_fn(
            x, b.old, b.old, b.advantages, EPS, b.mask, **keys)[0])

    return {
        "GAE, with gaps": (tokens(gae), "cut: + value"),
        "whitening": (tokens(lambda b: norm("batch", "batch", 1)(b.rewards, b.m)),
                      "n - 1", "std + 1e-5"),
        **each("k1 k2 k3", lambda *x: data.KLEstimator._compute_approx_kl(*x), "KL <= 10"),
        "clipped loss": policy(),
        "value loss": loss(lambda b, x: f.ppo_critic_loss_fn(
            x, b.old_values, b.rewards, EPS, b.mask)[0], "values"),
        "GRPO": (advantage(std="group"), "eps 1e-5"), "Dr. GRPO": advantage(),
        "RLOO": advantage(others=True),
        "GSPO": (policy(eps_clip_higher=HIGH, importance_sampling_level="sequence"), "token-mean"),
        "importance weights": tokens(lambda b: f.apply_rejection_sampling(
            b.old, b.sampler, b.mask, None, Given(metric="ratio", level="token", action="clamp",
                                                  lower=None, upper=CAP)).behave_imp_weight),
        "DAPO's length": lambda b: f.reward_overlong_penalty(
            dict(rewards=torch.zeros(5), input_ids=torch.zeros(5, 1),
                 loss_mask=torch.arange(100) < torch.tensor(STEPS)[:, None]), 20, 1.0, 100
        )["rewards"]}


def trl(w):
    trainer = w["trl/trainer/grpo_trainer.py"]
    last = "if self.loss_type in ['grpo', 'sapo']"

    def lines(b, kind, first="log_ratio = ", high=LOW, level="token", **given):
        owner = Given(
            importance_sampling_level=level, loss_type=kind, epsilon_low=LOW, epsilon_high=high,
            beta=0.0, off_policy_mask_threshold=None, off_policy_sequence_mask_delta=None,
            use_vllm=False, rollout_importance_sampling_mode=None, _has_teacher=False,
            max_completion_length=2 * T, current_gradient_accumulation_steps=1,
            model=Given(training=True), accelerator=Given(num_processes=1),
            _undo_gradient_accumulation_scaling=lambda loss: loss,
            args=Given(delta=None, use_bias_correction_kl=False, steps_per_generation=1))
        return trainer.lines(
            first, last, self=owner, old_per_token_logps=b.old, mask=b.m, completion_mask=b.m,
            advantages=b.advantages, entropy_mask=None, per_token_kl=None, mode="train",
            rollout_is_weights=None, inputs=dict(num_items_in_batch=b.mask.sum()),
            grpo_batch=Given(num_items_in_batch=b.mask.sum()),
            WINDOW_NORMALIZED_LOSS_TYPES=("cispo", "dapo", "fipo"), **given).loss

    def policy(kind="dapo", **keys):
        return loss(lambda b, x: lines(b, kind, per_token_logps=x, **keys))

    def mean(kind):
        return loss(lambda b, x: lines(b, kind, last, per_token_loss=x))

    def advantage(scale="group"):
        owner = Given(multi_objective_aggregation="sum_then_normalize", scale_rewards=scale,
                      reward_funcs="a", reward_weights=torch.ones(1))
        return rows(lambda b: trainer.lines(
            "if self.multi_objective_aggregation ==", "advantages = torch.nan_to_num",
            self=owner, num_generations=G, device="cpu", unscorable_mask=b.scores.isnan(),
            rewards_per_func=b.scores[:, None]).advantages)

    def weights(b):
        owner = Given(vllm_importance_sampling_mode="token_truncate",
                      vllm_importance_sampling_clip_min=None, vllm_importance_sampling_clip_max=CAP)
        return trainer.lines(
            "mask = completion_mask", "if self.vllm_importance_sampling_mode in", self=owner,
            completion_mask=b.m, tool_mask=None, old_per_token_logps=b.old,
            sampling_per_token_logps=b.sampler).vllm_importance_sampling_ratio

    return {
        "clipped loss": policy(), "token-mean": mean("bnpo"),
        "seq-mean-token-mean": (mean("grpo"), "empty rows"),
        "seq-mean-token-sum-norm": mean("dr_grpo"),
        "GSPO": policy("grpo", high=HIGH, level="sequence"),
        "CISPO": policy("cispo", high=1 + HIGH),
        **each("k3", lambda x, ref, kind: trainer.lines(
            "per_token_kl = ", "per_token_kl = ", per_token_logps=x, ref_per_token_logps=ref
        ).per_token_kl),
        "GRPO": advantage(), "Dr. GRPO": advantage("none"),
        "RLOO": rows(lambda b: w["trl/trainer/rloo_trainer.py"].lines(
            "grouped_rewards = ", "advantages = torch.nan_to_num", rewards=b.scores,
            num_generations=G, self=Given(normalize_advantages=False)).advantages),
        "importance weights": tokens(weights),
        "DAPO's length": lambda b: torch.tensor(w[
            "trl/rewards/other_rewards.py"]._SoftOverlongPunishment(100, 20)(
            [[0] * n for n in STEPS]))}


# column: (its package, its version, its function)
TRAINERS = {
    "verl": ("verl", "0.9.1", verl), "OpenRLHF": ("openrlhf", "0.11.2", openrlhf),
    "SkyRL": ("skyrl", "0.3.0", skyrl), "AReaL": ("areal", "1.0.4", areal),
    "TRL": ("trl", "1.16.0", trl)}
