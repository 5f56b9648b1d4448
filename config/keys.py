"""
The keys that ppo.py, grpo.py, sft.py and rm.py share: for data, checkpoints, devices, precision,
memory and options. The algorithm's keys are in the scripts.

A script's call of configure reads this file, and no module imports it:

    config, system = configure(globals(), "config/keys.py", checkpoint_interval=500)

The keys are then attributes of `system`, such as system.dtype, and the scripts pass `system` on as
one value. A keyword gives the script's own default of a key.
"""
# data
fields = ""  # THEIRS>OURS, names of fields: "question>prompt,solution>answer"; a.b is b inside a
epochs = 0.0  # instead of max_iters: how often to go over the training rows [0..100000]
too_long = "error"  # a row that does not fit; prompts lose their beginning [error | drop | cut]

# chats: prompts and completions that are lists of messages. These keys are for the policy's
# tokenizer; a reward model of another folder uses its own template
chat_template = ""  # a Jinja file instead of the tokenizer's own; the saved model has it, too
template_kwargs = ""  # the template's variables, such as enable_thinking=False,language='en'
system_prompt = ""  # the system message of chats that have none

# checkpoints, and checks that the ranks agree
checkpoint_interval = 50  # iterations between checkpoints; 0 = only at the end [>= 0]
keep_checkpoints = 1  # how many to keep; 2: one more, should the newest be damaged [>= 1]
save_dtype = "auto"  # of finished models; auto: no bit is lost [auto | float32 | bfloat16]
sync_check_interval = 10  # iterations between checks that all ranks have the same models [>= 1]
# other places for the log: "tensorboard", "wandb", "trackio"; several with commas between
report_to = ""  # empty = only log.jsonl; each must be installed

# precision and device
device_type = "auto"  # auto = a GPU if there is one [auto | cpu | cuda]
dtype = "float32"  # * 16 bits: autocast; 64: for tests [float32 | bfloat16 | float16 | float64]
master_weights = True  # False: train bfloat16 weights: 2 bytes each less, small steps are lost
deterministic = False  # GPUs: only kernels that repeat bit for bit, somewhat slower; CPUs always do
# the kernels of attention; flash attention is a package for GPUs, and for 16 bits
attn_implementation = "sdpa"  # [sdpa | eager | flash_attention_2 | flash_attention_3]
# compile takes a minute or two at the start. It is for GPUs: on CPUs the layers gain a tenth or
# nothing (docs/scale.md), and decoding is not compiled. Reading and training are compiled
# separately and may round differently: then the ratio of an iteration's first step is only about 1
compile = False  # + the layers, and steps of cuda_graphs; needs a C++ compiler, on GPUs Triton
# seconds after which waiting for a lost rank is an error
timeout = 600  # [1..1000000]

# memory; these three change no result
micro_batch_tokens = 0  # rows at once, by their tokens; 0 = by micro_batch_size [>= 0]
gradient_checkpointing = False  # compute each layer's activations again in the backward pass
head_chunk = 0  # logits of this many tokens at a time, 0 = of a whole micro-batch [>= 0]

# one value for all models, such as 3, or one for each, such as policy=3,reward=0. The models are
# policy, ref, reward, judge, value in ppo.py; the same without value in grpo.py; policy in sft.py;
# reward in rm.py. options/README.md says which keys do not go together
zero_stage = ""  # * ZeRO's stages, how much the ranks split: 0, 1, 2 or 3
offload = ""  # to the CPU's memory: none, optimizer or params (of frozen or sharded models)
lora = ""  # * RANK[:ALPHA[:TARGETS]], such as 16:32:q+v: train an adapter on the frozen model
# adafactor keeps a sum a row and a column for each matrix; adamw8bit is bitsandbytes'
optim = "adamw"  # + adamw, adamw8bit, adafactor or FILE.py:CLASS
quantize = "none"  # with lora: the frozen model in 4 bits, by bitsandbytes [none | 4bit]
weight_decay = 0.0  # of matrices; norms and biases do not decay [>= 0]

# -------------------------------------------------------------------------------------------------
# of ppo.py and grpo.py alone

# models beside the four
ref_path = ""  # with kl_coef: the reference, if it is another model; empty = policy_path
share_base = False  # all models are adapters on one trunk, policy_path; also reward_path
judge_path = ""  # a language model that is asked how good a response is: the reward judge
judge_template = "yes_no"  # with judge_path: its question: yes_no, rubric, a file; docs/data.md

# sampling
sampler = "own"  # vllm: an engine for large models and long responses; docs/scale.md [own | vllm]
vllm_cache = 4.0  # with sampler: GiB of vLLM's keys and values, on each rank that samples [> 0]
max_prompt_tokens = 0  # longest prompt, 0 = all that fits beside max_new_tokens [>= 0]
stop_strings = ""  # texts that end a response, too: "</answer>", or several, "['Q:', '###']"
rollout_batch_size = 0  # responses that decode at once on a rank, 0 = all; memory only [>= 0]
cuda_graphs = True  # decode by CUDA graphs on an NVIDIA GPU; False: slower, with less memory
generate_tp = 1  # this many neighbouring ranks share the policy while it samples [1..1024]
roles = ""  # ranks that train, generate, score, as train=6,generate=1,score=1; empty: all do all
staleness = 0  # + the policy that samples is this many updates old; options/ahead.py [0..100]

# several turns: a function that answers the policy; options/environment.py, docs/turns.md
environment = ""  # FILE.py:env, a function of the messages so far and the row
tools = ""  # FILE.py:f,FILE.py:g: functions that the policy may call, by its chat template
max_turns = 8  # with environment or tools: turns of the policy in a response [1..1000]

# scoring
reward_timeout = 300  # an iteration's seconds for rules; at most half of timeout [1..1000000]
code_seconds = 5  # of CPU time, for each process of a program that the reward code runs [1..10000]
save_rollouts = 0  # one in this many iterations writes all responses to rollouts.jsonl [>= 0]
# out_dir/best_policy: the policy of the best evaluation so far, by a metric, such as eval/accuracy,
# or by score, the number that the run maximises; -eval/kl: the least; empty = none
keep_best = ""  # with eval_path: that metric
