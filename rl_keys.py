"""
The keys that ppo.py and grpo.py share, beside those of keys.py: for sampling, scoring and the roles
of ranks. keys.py says how a script gets them.
"""
# models beside the four
ref_path = ""  # the reference, if it is another model than policy_path; empty = policy_path
share_base = False  # all models are adapters on one trunk, policy_path; also reward_path
judge_path = ""  # a language model that is asked how good a response is; may be ref_policy
judge_template = "yes_no"  # the question: yes_no, rubric, or a file; docs/rewards.md

# sampling
sampler = "own"  # vllm: an engine for large models and long responses; docs/scale.md [own | vllm]
vllm_cache = 4.0  # GiB of vLLM's cache of keys and values, on each rank that samples [> 0]
max_prompt_tokens = 0  # longest prompt, 0 = all that fits beside max_new_tokens [>= 0]
stop_strings = ""  # texts that end a response, too: "</answer>", or several, "['Q:', '###']"
rollout_batch_size = 0  # responses that decode at once on a rank, 0 = all; memory only [>= 0]
cuda_graphs = True  # decode by CUDA graphs, on an NVIDIA GPU and where layers see all tokens
generate_tp = 1  # so many neighbouring ranks share the policy while it samples [1..1024]
roles = ""  # ranks that train, generate, score, as train=6,generate=1,score=1; empty: all do all
staleness = 0  # the policy that samples a batch is so many updates old; options/roles.py [0..100]

# several turns: a function that answers the policy; options/environment.py, docs/turns.md
environment = ""  # FILE.py:env, a function of the messages so far and the row
tools = ""  # FILE.py:f,FILE.py:g: functions that the policy may call, by its chat template
max_turns = 8  # turns of the policy in a response [1..1000]

# scoring
reward_timeout = 300  # seconds for the rules in an iteration; below timeout [1..1000000]
code_seconds = 5  # of CPU time, for each process of a program that the reward code runs [1..10000]
save_rollouts = 0  # all responses of every so many iterations go to rollouts.jsonl; 0 = none [>= 0]
keep_best = False  # also save out_dir/best_policy, the policy with the best held-out score so far
