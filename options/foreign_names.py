"""
What other trainers call their settings, and the key here. It is read when a key is unknown, so that
the line says what to type; as a page it is docs/coming_from_trl.md:

    PYTHONPATH=. python options/foreign_names.py > docs/coming_from_trl.md
"""
import difflib
import functools
import os
import re

from configurator import read_keys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCRIPTS = "ppo.py", "grpo.py", "sft.py", "rm.py"
# heading: {their names: (what to type here, what differs; "" = nothing)}
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
    "Names that several use, or have used": {
        "config, config_file, config_path, config_name": (
            "nothing",
            "a config file has no key: type its path alone, as in python ppo.py config/mine.py"),
        "model_path, model_name, base_model, actor_model_path, policy_model, actor_path": (
            "policy_path (ppo.py, grpo.py), init_from (sft.py, rm.py)", ""),
        "ref_model, ref_model_path, ref_policy_path, reference_model": (
            "ref_path", "empty = the policy as it began"),
        "reward_model, reward_model_name, rm_path, reward_model_name_or_path": (
            "reward_path", "and reward_functions=reward_model"),
        "value_model, value_model_path, critic_path, critic_model, critic_model_path": (
            "value_init", "reward, policy, shared or a folder"),
        "tokenizer, tokenizer_name, processing_class": (
            "nothing", "a model brings its own; a new one of sft.py has tokenizer_path"),
        "dataset, dataset_path, data_path, data, train_file, train_data, train_files, "
        "prompt_path": (
            "prompts_path (ppo.py, grpo.py), train_path (sft.py, rm.py)", ""),
        "eval_file, eval_data, val_data, val_file, val_files, test_file, validation_file, "
        "test_files": (
            "eval_path (ppo.py, grpo.py), val_path (sft.py, rm.py)", ""),
        "val_size, test_size, eval_ratio, val_ratio": (
            "nothing",
            "held-out rows are a file of their own: eval_path, or val_path; data/convert.py "
            "--val=0.05 makes one"),
        "dataset_split, split, dataset_train_split, dataset_config, dataset_test_split": (
            "nothing", "they stand in the path, hf:NAME:SPLIT or hf:NAME:FOLDER:SPLIT"),
        "prompt_key, answer_key, response_key, chosen_key, rejected_key, output_key, "
        "input_template, dataset_text_field": (
            "fields", "names of fields: \"question>prompt,solution>answer\""),
        "apply_chat_template": ("nothing", "messages get the tokenizer's chat template"),
        "shuffle, shuffle_dataset": ("nothing", "each epoch has an order of its own, by seed"),
        "truncation": ("too_long", "error, drop or cut"),
        "filter_overlong_prompts": ("too_long=drop", ""),
        "dataset_num_proc, dataloader_num_workers, num_workers, remove_unused_columns": (
            "nothing", "the data is read once, at the start; other fields stay, for rewards"),
        "system_message, system": ("system_prompt", ""),
        "checkpoint_dir, save_dir, logdir, log_dir, logging_dir, output, output_path, out, "
        "save_folder": (
            "out_dir", "all of a run is in this folder"),
        "run_name, exp_name, experiment_name, wandb_run_name": (
            "out_dir", "its last part is the run's name"),
        "wandb, wandb_project, wandb_project_name, project_name, project, use_tensorboard": (
            "report_to", "the project is the variable WANDB_PROJECT"),
        "resume, resume_from, resume_mode, continue": (
            "nothing", "the same command goes on where it was stopped"),
        "push_to_hub, hub_model_id": ("nothing", "type hf upload NAME out_dir/policy"),
        "trust_remote_code": ("nothing", "no code of a model's folder is run"),
        "eval_strategy, evaluation_strategy, eval_every, eval_freq": (
            "eval_interval", "iterations; an evaluation is at 0 and at the end, too"),
        "val_before_train, eval_on_start": (
            "nothing", "a run with held-out data is evaluated at iteration 0"),
        "save_strategy, save_every, save_interval, checkpoint_every": (
            "checkpoint_interval", "iterations"),
        "metric_for_best_model, greater_is_better": (
            "keep_best", "the name of a number of the evaluation"),
        "mini_batch_size, minibatch_size": (
            "micro_batch_size or num_minibatches",
            "old TRL's is the rows of a forward, here micro_batch_size; verl's the rows of a "
            "step, here num_minibatches steps"),
        "micro_batch_size_per_gpu, train_micro_batch_size_per_gpu, device_batch_size, "
        "forward_batch_size": (
            "micro_batch_size", "rows at once; memory only"),
        "local_rollout_forward_batch_size, rollout_micro_batch_size": (
            "rollout_batch_size", "responses that decode at once; memory only"),
        "use_dynamic_bsz, max_tokens_per_batch, max_token_len_per_gpu": (
            "micro_batch_tokens", "tokens of a micro-batch"),
        "rollout_n, n_rollouts, num_samples, num_return_sequences, num_rollouts, n_samples": (
            "group_size", "in grpo.py"),
        "num_epochs, n_epochs, num_train_epoch, epoch, total_epochs": (
            "epochs", "passes over the data, instead of max_iters"),
        "ppo_epoch, update_epochs, noptepochs, K_epochs": ("ppo_epochs", "in ppo.py"),
        "num_steps, total_steps, max_train_steps, train_steps, total_timesteps, iterations, "
        "max_iterations, num_updates": (
            "max_iters", "iterations; an iteration samples one batch"),
        "policy_lr, actor_lr, pi_lr": ("learning_rate", ""),
        "value_lr, critic_lr, vf_lr, learning_rate_critic, value_model_lr": (
            "value_learning_rate", "in ppo.py; 0 = learning_rate"),
        "lr_scheduler, scheduler, lr_schedule, anneal_lr": (
            "lr_decay", "constant, linear or cosine"),
        "lr_warmup_steps, num_warmup_steps, lr_warmup_ratio, lr_warmup_steps_ratio": (
            "warmup_iters", "a number of iterations, no share"),
        "critic_warmup": (
            "nothing", "both learn from the start; recipes/value_first.diff has it"),
        "min_lr, min_lr_ratio": ("nothing", "the rate falls to 0, or stays: lr_decay"),
        "clip_grad, gradient_clip, gradient_clipping, max_norm, grad_norm_clip, "
        "grad_clip_norm, gradient_clip_val": (
            "grad_clip", "0 = none, as in ppo.py by default"),
        "adam_betas, betas": ("beta1 and beta2", ""),
        "optimizer, optim_type": ("optim", "adamw, adamw8bit, adafactor or muon"),
        "gae_lambda, lmbda, gae_lam": ("lam", ""),
        "discount, discount_factor": ("gamma", ""),
        "clip_range, clip_eps, ppo_clip, clip_epsilon, epsilon_low, eps_clip_low": (
            "cliprange", ""),
        "eps_clip_high, clip_range_high": ("cliprange_high", "in grpo.py"),
        "clip_range_vf, clip_range_value, clip_vloss, value_clip_range": (
            "cliprange_value", "in ppo.py"),
        "value_loss_coef, vf_loss_coef, value_coef, critic_coef, vf_coeff": (
            "vf_coef", "in ppo.py"),
        "ent_coef, entropy_coefficient, entropy_beta, entropy_loss_coef, entropy_weight": (
            "entropy_coef", ""),
        "kl_penalty, kl_beta, kl_weight, kl_ctrl.kl_coef, beta_kl, kl_loss_weight": (
            "kl_coef", "how it is estimated says kl_estimator"),
        "target_kl, kl_horizon, adap_kl_ctrl, horizon": (
            "nothing", "kl_coef stays as it is; recipes/kl_controller.diff adapts it"),
        "kl_type, kl_loss_estimator, kl_penalty_type": ("kl_estimator", "k1, k2 or k3"),
        "normalize_advantages, whiten_advantages, advantage_normalization": (
            "nothing", "ppo.py whitens advantages; in grpo.py scale_by decides"),
        "normalize_reward, reward_normalization, reward_scale, reward_clip_range, "
        "cliprange_reward, use_score_scaling, use_score_norm": (
            "nothing",
            "scores count as they are; a weight scales them: reward_functions=0.1*reward_model"),
        "reward_fn, reward_func, reward_function, rewards, reward, reward_manager": (
            "reward_functions", "\"1.0*accuracy,0.5*FILE.py:function\""),
        "dynamic_sampling, dynamic_filtering, filter_groups.enable": ("max_refills", "in grpo.py"),
        "overlong_buffer.enable, overlong_filter": (
            "reward_functions", "with the reward length; or in grpo.py truncated=mask"),
        "temp, sampling_temperature": ("temperature", ""),
        "do_sample, greedy": (
            "nothing", "responses are sampled; tools/eval.py answers greedily, too"),
        "max_tokens_to_generate, max_gen_len, max_response_len, gen_length, "
        "max_generation_length": (
            "max_new_tokens", ""),
        "max_seq_len, seq_len, seq_length, sequence_length, block_size, cutoff_len, "
        "model_max_length, max_sequence_length": (
            "max_tokens (sft.py, rm.py), max_new_tokens (ppo.py, grpo.py)", ""),
        "stop, stop_words, stop_sequences, stop_token_ids": ("stop_strings", ""),
        "mixed_precision, precision, amp, param_dtype, torch_amp": (
            "dtype", "float32, bfloat16, float16 or float64"),
        "device_map": (
            "nothing", "each rank has its own device; zero_stage splits a model over the ranks"),
        "device, use_cpu, no_cuda, cpu": ("device_type", "cpu or cuda"),
        "num_gpus, gpus, n_gpus, num_processes, nproc_per_node, n_gpus_per_node, world_size": (
            "torchrun --nproc_per_node", "docs/scale.md"),
        "ddp_timeout, nccl_timeout": ("timeout", "seconds"),
        "use_gradient_checkpointing, gradient_checkpoint, enable_gradient_checkpointing, "
        "activation_checkpointing, gradient_checkpointing_kwargs": (
            "gradient_checkpointing=True", ""),
        "use_flash_attention_2, use_flash_attn, flash_attention": (
            "attn_implementation=flash_attention_2", ""),
        "load_in_8bit, quantization, quantization_config, bnb_4bit": ("quantize=4bit", "with lora"),
        "peft, peft_config, use_lora, lora_enable, lora_target, lora_dropout": (
            "lora", "RANK:ALPHA:TARGETS, such as 16:32:q+v; it has no dropout"),
        "param_offload, optimizer_offload, offload_optimizer, cpu_offload, offload_params": (
            "offload", "optimizer or params, for each model"),
        "zero, zero_optimization.stage, deepspeed_config, fsdp_config": (
            "zero_stage", "0 to 3, for each model; no file of settings"),
        "use_liger_kernel, use_liger": ("head_chunk", "logits in parts, for memory"),
        "vllm, vllm_mode, vllm_server_host, rollout.name, vllm_enable_sleep": ("sampler=vllm", ""),
        "tensor_parallel_size, tp_size, vllm_tensor_parallel": ("generate_tp", ""),
        "use_ema, enable_ema, ema_beta, ema": ("ema_decay", "0 = none"),
        "ptx_coeff, pretrain_data, ptx_data": ("ptx_path and ptx_coef", "in ppo.py"),
        "verbose, logging_strategy, log_interval, log_every, logging_first_step": (
            "nothing", "each iteration has a line in log.jsonl"),
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


def meant(key, keys, where):
    """What may be meant by a key that a script has not, as a clause; "" where nothing is alike."""
    if "-" in key and (key := key.replace("-", "_")) in keys:
        return f"did you mean {key!r}?"
    others = [script for script in SCRIPTS if key in keys_of(script)]
    # a wrong hint is worse than none
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.75)
    hint = (f"it is a key of {' and '.join(others)}" if others else hint_for(key, keys) or (
            f"did you mean {near[0]!r}?" if near else ""))
    positive = re.sub("^(no|disable)_(?=.)", "", key)
    if positive != key and isinstance(getattr(keys.get(positive), "default", None), bool):
        hint = f"type --{positive}=False"
    if where.endswith(".py") and not others:
        hint = f"{hint or '--help lists the keys'} (a name that is no key begins with _)"
    return hint


def hint_for(key, keys):
    """What to type in the place of another trainer's key, as a clause; "" of other keys."""
    for table in NAMES.values():
        for names, (ours, remark) in table.items():
            if any(f".{name}".endswith(f".{key}") for name in names.split(", ")):
                if ours == "nothing":
                    return f"there is none here: {remark}"
                behind = f"; {remark}" if remark else ""
                words = re.sub(r"=\S+|\(.*?\)|recipes.*|torchrun.*", "", ours)
                named = re.findall(r"[a-z_]+", words)
                of = {script: [name for name in named if name in keys_of(script)]
                      for script in SCRIPTS}
                if any(of.values()) and not any(name in keys for name in named):
                    behind += f" (of {' and '.join(filter(of.get, of))}, not of this script)"
                return f"here it is {ours}{behind}"
    return ""


@functools.cache
def keys_of(script):
    """The script's own keys; none of a script that is not there, as in a fork."""
    path = os.path.join(ROOT, script)
    return read_keys(path) if os.path.isfile(path) else {}


def page():
    """The text of docs/coming_from_trl.md."""
    parts = [HEAD]
    for heading, table in NAMES.items():
        parts.append(f"\n## {heading}\n\n| theirs | here | what differs |\n|---|---|---|\n")
        for names, (ours, remark) in table.items():
            theirs = ", ".join(f"`{name}`" for name in names.split(", "))
            parts.append(f"| {theirs} | {ours} | {remark.replace('|', ' or ')} |\n")
    return "".join(parts)


if __name__ == "__main__":
    print(page(), end="")
