"""
vLLM as the sampler, the key sampler = "vllm": for models and responses so long that sampling takes
most of the time. An optional package; it has kernels, a scheduler and a noise of its own.

    rank                                          vLLM, a process of its own
    responder: VLLM(policy, ...)    starts    serve: loads the architecture, without weights
    take_weights(policy)            ----->    holds them; answers with the sum of their bits
    respond(prompts, ...)           ----->    samples; answers with ids and log-probs

Each rank that samples has such a process beside it, in the same environment, or in one of its own:
VLLM_PYTHON=venv/bin/python. In the rank's own process vLLM (0.32) would take all ranks for its own,
also those that do not sample, seed torch and set threads anew. The two talk through a socket; the
weights lie in memory that both can see. If one of the two ends, so does the other.
"""
import ctypes
import importlib
import mmap
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection, Pipe

import torch

import parallel
from errors import BadInput, Lost, Stop, first_line
from ranks import this_rank

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
START = 1800  # seconds that vLLM may take to begin: it compiles kernels for minutes
DTYPES = dict(float32=torch.float32, bfloat16=torch.bfloat16, float16=torch.float16)
OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def bits(tensors):
    """The sum of the bit patterns of all numbers, which no order of them changes."""
    whole = {4: torch.int32, 2: torch.int16}
    return sum(t.contiguous().view(whole[t.element_size()]).sum(dtype=torch.int64).item()
               for t in tensors)


# --------------------------------------------------------------------------------------------------
# on the rank


def whole_weights(policy, vocab_size):
    """
    A collective where the policy is sharded: (name, tensor) of all that it computes with, an
    adapter merged into its trunk, a head that is the table of embeddings a second time. Of both,
    the rows of vocab_size ids: the rest is padding.
    """
    hf = policy.hf
    by_id = [*hf.get_input_embeddings().parameters(), *hf.get_output_embeddings().parameters()]
    for name, p in hf.named_parameters(remove_duplicate=False):
        W = policy.as_saved(name, parallel.whole(p))  # COLLECTIVE
        yield name, W[:vocab_size] if any(p is q for q in by_id) else W


engines = {}  # {policy: its VLLM}: started at the first rollout


def responder(policy, system, device, temperature, seeds):
    """
    A collective: vLLM as the sampler of rollout.sampling, with the policy's present weights. seeds:
    of the responses; of a later turn they are made of its uniforms. Raises BadInput.
    """
    if system.dtype not in DTYPES:
        raise BadInput(f"sampler = 'vllm' goes with no dtype = {system.dtype!r}; type another one")
    torch.cuda.empty_cache()  # vLLM needs what the update has used
    if policy not in engines:
        try:
            with parallel.patient(), parallel.in_step():  # COLLECTIVE: wait here for the slowest
                engines[policy] = VLLM(policy, system, device)
            # some models have other names in vLLM, or no kernels here: say so now
            engines[policy].take_weights(policy)  # COLLECTIVE
            engines[policy].ask("sample", dict(
                prompts=[[0]], seeds=[0], max_tokens=[1], temperature=1.0, eos_ids=[]))
        except Stop as e:
            raise BadInput(f"sampler = 'vllm', {policy.path}: {e}; type --sampler=own") from e
    vllm = engines[policy]
    vllm.take_weights(policy)  # COLLECTIVE

    def respond(prompts, uniforms, budgets=None):
        own = seeds if budgets is None else (uniforms[:, 0] * 2**32).long().tolist()
        return vllm.respond(prompts, uniforms.shape[1], temperature, own, budgets)

    return respond


class VLLM:
    """The vLLM of this rank, which holds a copy of the policy. Raises BadInput."""

    def __init__(self, policy, system, device):
        self.dtype, self.timeout, self.device = DTYPES[system.dtype], system.timeout, device
        self.tokenizer, gpu = policy.tokenizer, device.type == "cuda"
        # room for twice as many, for in 4 bits two count as one; memory that is not used is free
        room = 2 * sum(p.numel() for _, p in policy.hf.named_parameters(remove_duplicate=False))
        self.start(room * self.dtype.itemsize)
        self.ask("load", dict(
            folder=policy.path, dtype=system.dtype, gpu=gpu, sleeps=gpu,
            stop=list(self.tokenizer.stop_strings), vocab_size=self.tokenizer.vocab_size,
            cache=int(system.vllm_cache * 2**30), at_once=system.rollout_batch_size or 256),
            seconds=START)

    def start(self, size):
        """Start the process. size: bytes of the memory for the weights."""
        environment = {name: value for name, value in os.environ.items()
                       if name not in OF_TORCHRUN and not name.startswith("TORCHELASTIC")}
        if self.device.type == "cuda":
            visible, number = os.environ.get("CUDA_VISIBLE_DEVICES", ""), self.device.index or 0
            own = visible.split(",")[number] if visible else str(number)
            environment["CUDA_VISIBLE_DEVICES"] = own
        self.connection, theirs = Pipe()
        memory = os.memfd_create("weights")
        os.ftruncate(memory, size)
        code = (f"import sys; sys.path.insert(0, {ROOT!r}); from options.vllm import serve; "
                f"serve({theirs.fileno()}, {memory}, {os.getpid()})")
        quiet = None if "VLLM_LOGGING_LEVEL" in os.environ else subprocess.DEVNULL
        python = os.environ.get("VLLM_PYTHON", sys.executable)
        try:
            self.process = subprocess.Popen(
                [python, "-c", code], env=environment, pass_fds=[theirs.fileno(), memory],
                stdin=subprocess.DEVNULL, stdout=quiet, stderr=quiet)
        except OSError as e:
            raise BadInput(f"VLLM_PYTHON={python}: {e.strerror}; give the interpreter of an "
                           "environment with vLLM") from e
        theirs.close()
        self.memory = torch.frombuffer(mmap.mmap(memory, size), dtype=self.dtype)
        os.close(memory)

    def ask(self, task, given, stop=None, seconds=None):
        """
        The result of load, hold or sample below in vLLM's process; given: its arguments. None if
        `stop` says True before. seconds: how long to wait, None: as for other ranks. Raises Lost.
        """
        began, seconds = time.monotonic(), seconds or self.timeout
        try:
            self.connection.send((task, given))
            while not self.connection.poll(0.1):
                if stop is not None and stop():
                    self.process.kill()
                    return None
                if time.monotonic() - began > seconds:
                    raise Lost(f"vLLM has not answered for timeout = {seconds} seconds")
            answer = self.connection.recv()
        except (EOFError, ConnectionError) as e:
            raise Lost(f"vLLM has ended, with exit code {self.process.wait()}; "
                       "VLLM_LOGGING_LEVEL=INFO shows what it says") from e
        if isinstance(answer, Lost):
            raise answer
        return answer

    def take_weights(self, policy):
        """vLLM gets the weights of now. A collective where they are sharded. Raises Lost."""
        tensors, end, sent = [], 0, 0
        for name, t in whole_weights(policy, self.tokenizer.vocab_size):  # COLLECTIVE
            t = t.detach().to(self.dtype)
            tensors.append((name, t.shape, end))
            self.memory[end:end + t.numel()].view(t.shape).copy_(t)
            end, sent = end + t.numel(), sent + bits([t])
        if self.ask("hold", dict(tensors=tensors)) != sent:
            raise Lost("vLLM has not taken all weights that were sent to it: it has other names "
                       "for this model's tensors")

    def respond(self, prompts, max_new_tokens, temperature, seeds, budgets=None):
        """
        What rollout.decode returns for n prompts: responses and log-probs (n, R), lengths and
        finished (n,). seeds: a number for each response, which decides its noise.
        """
        n, R = len(prompts), max_new_tokens
        responses, logprobs = torch.full((n, R), self.tokenizer.pad_id), torch.zeros(n, R)
        lengths, finished = torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.bool)
        budgets = budgets or [R] * n
        sampled = self.ask("sample", dict(
            prompts=[list(ids) for ids in prompts], seeds=seeds, max_tokens=budgets,
            temperature=temperature, eos_ids=sorted(self.tokenizer.eos_ids)),
            lambda: this_rank.stop)
        for row, (ids, of_ids, ended) in enumerate(sampled or ()):
            if len(ids) < budgets[row] and not ended:
                raise Lost(f"vLLM's cache has no room for a prompt of {len(prompts[row])} tokens "
                           f"and max_new_tokens = {R}; raise vllm_cache")
            if self.tokenizer.stop_strings:  # vLLM looks in another text than we do: ours count
                first = next((n for n in range(1, len(ids) + 1)
                              if self.tokenizer.has_stop(ids[:n])), None)
                ended, ids = ended or first is not None, ids[:first]
            lengths[row], finished[row] = len(ids), ended
            responses[row, :len(ids)] = torch.tensor(ids)
            logprobs[row, :len(ids)] = torch.tensor(of_ids[:len(ids)])
        return tuple(t.to(self.device) for t in (responses, logprobs, lengths, finished))


# --------------------------------------------------------------------------------------------------
# in vLLM's process


def serve(socket_number, memory_number, parent):
    """Do the rank's tasks, until it has ended."""
    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:  # the rank decides when to stop
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the rank
    if os.getppid() != parent:
        return
    connection = Connection(socket_number)
    memory = mmap.mmap(memory_number, 0)
    llm = None
    while True:
        try:
            task, given = connection.recv()
        except EOFError:
            os._exit(0)  # vLLM's own way to end takes up to a minute
        try:
            if task == "load":
                llm, answer = load(**given), "ready"
            elif task == "hold":
                answer = hold(llm, memory, **given)
            else:
                answer = sample(llm, memory, **given)
        except Exception as e:  # vLLM's own, of any class
            words = " ".join(str(e).split())[:300]  # of pydantic, the first line says nothing
            answer = e if isinstance(e, Lost) else Lost(f"vLLM: {type(e).__name__}: {words}")
        connection.send(answer)


def load(folder, dtype, stop, gpu, vocab_size, sleeps, cache, at_once):
    """A vLLM of the architecture that is in a folder. Its weights come by `hold`."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1",
                      VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        vllm = importlib.import_module("vllm")
    except ImportError as e:
        raise Lost(f"there is no vLLM in {sys.executable} ({first_line(e)}); install it (pip "
                   "install vllm==0.32.0), or set VLLM_PYTHON to an interpreter that has it") from e
    if not gpu:
        # oneDNN would hold matrices in a form whose bits nobody can sum
        importlib.import_module("vllm._custom_ops")._supports_onednn = False
    llm = vllm.LLM(
        folder, dtype=dtype, load_format="dummy", generation_config="vllm", max_model_len=-1,
        max_num_seqs=at_once, kv_cache_memory_bytes=cache, gpu_memory_utilization=0.01,
        enforce_eager=not gpu, enable_sleep_mode=sleeps, enable_prefix_caching=True, seed=0,
        skip_tokenizer_init=not stop, logprobs_mode="processed_logprobs", disable_log_stats=True,
        # tied: vLLM for CPUs keeps a second copy of the matrix, and forgets to renew it
        hf_overrides=dict(vocab_size=vocab_size, tie_word_embeddings=False))
    llm.stop, llm.sleeps, llm.asleep, llm.weights_dtype = stop, sleeps, sleeps, DTYPES[dtype]
    if sleeps:
        llm.sleep(level=2)
    return llm


def hold(llm, memory, tensors):
    """
    Take the weights that the rank has written into the memory. tensors: the name of each, its shape
    and where it begins. Returns the sum of the bits of all that vLLM holds then.
    """
    numbers = torch.frombuffer(memory, dtype=llm.weights_dtype)
    weights = [(name, numbers[start:start + shape.numel()].view(shape))
               for name, shape, start in tensors]
    if llm.asleep:
        llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=iter(weights)))
    if llm.asleep:
        llm.wake_up(tags=["kv_cache"])
    llm.tensors, llm.asleep = tensors, False
    llm.reset_prefix_cache()  # it has keys and values of the old weights
    return llm.apply_model(lambda model: bits(model.parameters()))[0]


def sample(llm, memory, prompts, seeds, max_tokens, temperature, eos_ids):
    """For each prompt: ids of the response, their log-probs, whether an EOS or a stop ended it."""
    from vllm import SamplingParams

    if llm.asleep:  # since an earlier turn; asleep it has no weights
        hold(llm, memory, llm.tensors)
    settings = [SamplingParams(
        temperature=temperature, seed=seed, max_tokens=longest, stop_token_ids=eos_ids,
        ignore_eos=True, logprobs=0, detokenize=bool(llm.stop), stop=llm.stop or None,
        include_stop_str_in_output=True) for seed, longest in zip(seeds, max_tokens, strict=True)]
    results = llm.generate([dict(prompt_token_ids=ids) for ids in prompts], settings,
                           use_tqdm=False) if prompts else []
    if llm.sleeps:
        llm.sleep(level=2)
        llm.asleep = True
    texts = [result.outputs[0] for result in results]
    return [([*text.token_ids],
             [of[i].logprob for i, of in zip(text.token_ids, text.logprobs, strict=True)],
             text.finish_reason == "stop") for text in texts]
