"""
What other trainers call their settings, and the key here. It is read when a key is unknown, so that
the line says what to type; as a page it is docs/coming_from_trl.md:

    python options/foreign_names.py > docs/coming_from_trl.md
"""
# heading: {their name: (what to type here, what differs; "" = nothing)}
NAMES = {
    "TRL, and transformers' TrainingArguments": {
        "model_name_or_path": ("policy_path (ppo.py, grpo.py), init_from (sft.py, rm.py)", ""),
        "model": ("policy_path (ppo.py, grpo.py), init_from (sft.py, rm.py)", ""),
        "sft_model_path": ("policy_path", ""),
        "reward_model_path": ("reward_path", "and reward_functions=reward_model"),
        "dataset_name": ("prompts_path (ppo.py, grpo.py), train_path (sft.py, rm.py)",
                         "files; a set of the hub is hf:NAME (docs/data.md)"),
        "train_dataset": ("prompts_path (ppo.py, grpo.py), train_path (sft.py, rm.py)", ""),
        "eval_dataset": ("eval_path (ppo.py, grpo.py), val_path (sft.py, rm.py)", ""),
        "output_dir": ("out_dir", ""),
        "resume_from_checkpoint": ("nothing", "the same command goes on where it was stopped"),
        "overwrite_output_dir": ("nothing", "delete the folder yourself"),
        "per_device_train_batch_size": (
            "micro_batch_size",
            "memory only; batch_size counts the responses of all ranks in an iteration"),
        "per_device_eval_batch_size": ("rollout_batch_size", "memory only"),
        "gradient_accumulation_steps": (
            "nothing", "batch_size, num_minibatches and micro_batch_size decide it"),
        "generation_batch_size": ("batch_size", "responses of all ranks"),
        "steps_per_generation": ("num_minibatches", ""),
        "num_generations": ("group_size", "in grpo.py"),
        "num_train_epochs": ("epochs", "0 = max_iters counts"),
        "num_ppo_epochs": ("ppo_epochs", ""),
        "num_mini_batches": ("num_minibatches", ""),
        "max_steps": ("max_iters", "iterations; in ppo.py each has several steps"),
        "total_episodes": ("max_iters", "iterations; an episode is a response"),
        "max_prompt_length": ("max_prompt_tokens", "and too_long says what becomes of longer ones"),
        "max_completion_length": ("max_new_tokens", ""),
        "response_length": ("max_new_tokens", ""),
        "max_length": ("max_tokens (sft.py, rm.py), max_new_tokens (ppo.py, grpo.py)", ""),
        "max_seq_length": ("max_tokens (sft.py, rm.py)", ""),
        "beta": ("kl_coef", "TRL's GRPO has 0 (no reference), grpo.py 0.04, ppo.py 0.05"),
        "epsilon": ("cliprange", ""),
        "epsilon_high": ("cliprange_high", ""),
        "scale_rewards": ("scale_by", "std, batch or none"),
        "reward_funcs": ("reward_functions", '"1.0*accuracy,0.5*FILE.py:function"'),
        "reward_weights": ("reward_functions", "each weight stands there: 0.5*format"),
        "mask_truncated_completions": ("truncated=mask", ""),
        "whiten_rewards": ("nothing", "advantages are whitened, rewards are not"),
        "stop_token": ("stop_strings", "the EOS ids of the model always end a response"),
        "vllm_importance_sampling_cap": ("importance_cap", ""),
        "lr": ("learning_rate", ""),
        "lr_scheduler_type": ("lr_decay", "constant, linear or cosine"),
        "warmup_steps": ("warmup_iters", ""),
        "warmup_ratio": ("warmup_iters", "a number of iterations, no share"),
        "max_grad_norm": ("grad_clip", "0 = none, as in ppo.py by default"),
        "adam_beta1": ("beta1", ""),
        "adam_beta2": ("beta2", ""),
        "adam_epsilon": ("adam_eps", ""),
        "bf16": ("dtype=bfloat16", ""),
        "fp16": ("dtype=float16", ""),
        "torch_dtype": ("dtype", "of the computation; the weights stay in float32 beside it"),
        "use_peft": ("lora=16", ""),
        "lora_r": ("lora", "RANK:ALPHA:TARGETS, such as 16:32:q+v"),
        "lora_alpha": ("lora", "RANK:ALPHA:TARGETS, such as 16:32:q+v"),
        "lora_target_modules": ("lora", "RANK:ALPHA:TARGETS, such as 16:32:q+v"),
        "load_in_4bit": ("quantize=4bit", "with lora"),
        "deepspeed": ("zero_stage", "0 to 3, for each model; no file of settings"),
        "fsdp": ("zero_stage=3", ""),
        "torch_compile": ("compile", ""),
        "use_vllm": ("sampler=vllm", ""),
        "vllm_gpu_memory_utilization": ("vllm_cache", "GiB, no share"),
        "vllm_tensor_parallel_size": ("generate_tp", "for our own sampler"),
        "logging_steps": ("nothing", "each iteration has a line in log.jsonl"),
        "log_completions": ("save_rollouts", "samples of each evaluation are saved always"),
        "save_steps": ("checkpoint_interval", "iterations"),
        "save_total_limit": ("keep_checkpoints", ""),
        "eval_steps": ("eval_interval", "iterations"),
        "load_best_model_at_end": ("keep_best", "in out_dir/best_policy"),
        "environment_factory": ("environment", "docs/turns.md"),
        "packing": ("nothing", "rows of about one length are trained together instead"),
        "completion_only_loss": ("nothing", "only completions are learned"),
        "assistant_only_loss": ("nothing", "only completions are learned; docs/data.md"),
        "disable_dropout": ("nothing", "there is none, so that ratios are 1 before the first step"),
        "top_p": ("nothing", "a cut distribution is not the one whose log-probs are trained"),
        "top_k": ("nothing", "a cut distribution is not the one whose log-probs are trained"),
        "min_p": ("nothing", "a cut distribution is not the one whose log-probs are trained"),
        "repetition_penalty": ("nothing", "its distribution is not the one that is trained"),
        "sync_ref_model": ("nothing", "the reference stays as it is"),
    },
    "OpenRLHF": {
        "pretrain": ("policy_path (ppo.py, grpo.py), init_from (sft.py, rm.py)", ""),
        "reward_pretrain": ("reward_path", ""),
        "critic_pretrain": ("value_init", "reward, policy, shared or a folder"),
        "remote_rm_url": ("reward_functions=FILE.py:function", "a function that asks your server"),
        "prompt_data": ("prompts_path", ""),
        "input_key": ("fields", 'names of fields: "question>prompt,solution>answer"'),
        "label_key": ("fields", 'names of fields: "question>prompt,solution>answer"'),
        "prompt_max_len": ("max_prompt_tokens", ""),
        "generate_max_len": ("max_new_tokens", ""),
        "n_samples_per_prompt": ("group_size", "in grpo.py"),
        "train_batch_size": ("batch_size and num_minibatches",
                             "a step trains on batch_size / num_minibatches"),
        "micro_train_batch_size": ("micro_batch_size", ""),
        "micro_rollout_batch_size": ("rollout_batch_size", "responses that decode at once"),
        "num_episodes": ("epochs", "passes over the prompts"),
        "max_epochs": ("ppo_epochs (ppo.py), num_iterations (grpo.py), epochs (sft.py, rm.py)", ""),
        "actor_learning_rate": ("learning_rate", ""),
        "critic_learning_rate": ("value_learning_rate", "0 = learning_rate"),
        "init_kl_coef": ("kl_coef", "it stays; recipes/kl_controller.diff adapts it"),
        "kl_target": ("recipes/kl_controller.diff", ""),
        "use_kl_loss": ("kl_in=loss", "in grpo.py"),
        "eps_clip": ("cliprange", ""),
        "value_clip": ("cliprange_value", ""),
        "lambd": ("lam", ""),
        "advantage_estimator": ("ppo.py or grpo.py", "docs/algorithms.md has each by its keys"),
        "flash_attn": ("attn_implementation=flash_attention_2", ""),
        "adam_offload": ("offload=optimizer", ""),
        "packing_samples": ("nothing", "rows of about one length are trained together instead"),
        "lora_rank": ("lora", "RANK:ALPHA:TARGETS, such as 16:32:q+v"),
        "vllm_num_engines": ("roles", "with sampler=vllm: ranks that train, generate, score"),
        "async_train": ("staleness=1", ""),
        "agent_func_path": ("environment", "docs/turns.md"),
        "save_path": ("out_dir", "the policy is in out_dir/policy"),
        "ckpt_path": ("out_dir", ""),
        "load_checkpoint": ("nothing", "the same command goes on where it was stopped"),
        "use_wandb": ("report_to=wandb", ""),
        "ring_attn_size": ("nothing", "a sequence is never split over ranks"),
    },
    "verl": {
        "data.train_files": ("prompts_path (ppo.py, grpo.py), train_path (sft.py)", ""),
        "data.val_files": ("eval_path (ppo.py, grpo.py), val_path (sft.py)", ""),
        "data.train_batch_size": ("batch_size", "responses; in verl prompts"),
        "data.max_prompt_length": ("max_prompt_tokens", ""),
        "data.max_response_length": ("max_new_tokens", ""),
        "actor_rollout_ref.model.path": ("policy_path", ""),
        "critic.model.path": ("value_init", "reward, policy, shared or a folder"),
        "actor_rollout_ref.actor.optim.lr": ("learning_rate", ""),
        "critic.optim.lr": ("value_learning_rate", "0 = learning_rate"),
        "actor_rollout_ref.actor.ppo_mini_batch_size": (
            "num_minibatches", "how many steps the batch is cut into, no size"),
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": ("micro_batch_size", ""),
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": ("micro_batch_tokens", ""),
        "actor_rollout_ref.actor.clip_ratio": ("cliprange", ""),
        "actor_rollout_ref.actor.clip_ratio_low": ("cliprange", ""),
        "actor_rollout_ref.actor.clip_ratio_high": ("cliprange_high", "in grpo.py"),
        "actor_rollout_ref.actor.entropy_coeff": ("entropy_coef", ""),
        "actor_rollout_ref.actor.kl_loss_coef": ("kl_coef with kl_in=loss", "in grpo.py"),
        "actor_rollout_ref.actor.kl_loss_type": ("kl_estimator", "low_var_kl is k3"),
        "actor_rollout_ref.actor.loss_agg_mode": ("aggregation", "in grpo.py"),
        "actor_rollout_ref.rollout.n": ("group_size", "in grpo.py"),
        "actor_rollout_ref.rollout.tensor_model_parallel_size": ("generate_tp", ""),
        "actor_rollout_ref.rollout.gpu_memory_utilization": ("vllm_cache", "GiB, no share"),
        "algorithm.adv_estimator": ("ppo.py or grpo.py", "docs/algorithms.md has each by its keys"),
        "algorithm.use_kl_in_reward": ("kl_in=reward", "in grpo.py; ppo.py always has it so"),
        "algorithm.norm_adv_by_std_in_grpo": ("scale_by", "std, batch or none"),
        "custom_reward_function.path": ("reward_functions=FILE.py:function", ""),
        "trainer.total_epochs": ("epochs", ""),
        "trainer.total_training_steps": ("max_iters", ""),
        "trainer.save_freq": ("checkpoint_interval", "iterations"),
        "trainer.test_freq": ("eval_interval", "iterations"),
        "trainer.default_local_dir": ("out_dir", ""),
        "trainer.logger": ("report_to", ""),
        "trainer.nnodes": ("torchrun --nnodes", "docs/scale.md"),
        "trainer.n_gpus_per_node": ("torchrun --nproc_per_node", ""),
    },
}

HEAD = """# Coming from TRL, OpenRLHF or verl

Their setting, and the key of quartet; an unknown key is answered from this table. Four differences
matter most:

- **`batch_size` counts responses**, of an iteration and of all ranks together. Nothing is per
  device: 1 GPU and 8 GPUs run the same experiment, and `micro_batch_size` is memory alone.
- **An iteration** samples a batch and makes one or more optimizer steps on it: in `ppo.py`
  `ppo_epochs` times `num_minibatches`, in `grpo.py` `num_iterations` times `num_minibatches`.
  `max_iters` and all intervals count iterations.
- **The KL** to the reference is on by default (`kl_coef`), and `temperature` holds for every
  log-prob, not only for sampling.
- **A run is a folder**: the same command goes on where it was stopped.

"nothing": there is no such key, for the reason beside it. `python grpo.py --help` has all keys.
"""


def hint_for(key):
    """What to type in the place of another trainer's key, as a clause; "" of other keys."""
    for table in NAMES.values():
        for name, (ours, remark) in table.items():
            if f".{name}".endswith(f".{key}"):
                if ours == "nothing":
                    return f"there is none here: {remark}"
                return f"here it is {ours}" + (f"; {remark}" if remark else "")
    return ""


def page():
    """The text of docs/coming_from_trl.md."""
    parts = [HEAD]
    for heading, table in NAMES.items():
        parts.append(f"\n## {heading}\n\n| theirs | here | what differs |\n|---|---|---|\n")
        for name, (ours, remark) in table.items():
            parts.append(f"| `{name}` | {ours} | {remark.replace('|', ' or ')} |\n")
    return "".join(parts)


if __name__ == "__main__":
    print(page(), end="")
