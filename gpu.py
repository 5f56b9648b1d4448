"""
More about a run on GPUs: the GPU, the versions and kernels, and MFU: the models' operations as a
share of the GPUs' peak.
"""
import torch

import parallel

# the peak TFLOP/s of a GPU in 16 bits, without sparsity, from its maker
PEAK_TFLOPS = {"B200": 2250, "H200": 989, "H100": 989, "A100": 312, "L40S": 362, "L4": 121}


def gpu():
    """
    For config.json: this rank's GPU, the versions, and the allowed kernels, read from torch
    (launch.choose_kernels sets them).
    """
    attention = [name for name, on in (
        ("flash", torch.backends.cuda.flash_sdp_enabled()),
        ("memory-efficient", torch.backends.cuda.mem_efficient_sdp_enabled()),
        ("cuDNN", torch.backends.cuda.cudnn_sdp_enabled()),
        ("plain", torch.backends.cuda.math_sdp_enabled())) if on]
    return dict(
        name=torch.cuda.get_device_name(), torch=torch.__version__, cuda=torch.version.cuda,
        tf32=torch.get_float32_matmul_precision() != "highest" or torch.backends.cudnn.allow_tf32,
        sums_in_16_bits=torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        attention=attention, deterministic=torch.are_deterministic_algorithms_enabled())


def share_of_peak(models, trained, read, learned, seconds, dtype, device):
    """
    {"time/mfu": the operations of an iteration, as a share of the most that the GPUs of all ranks
    could do in its seconds}; {} where their peak is not known. models: {name: model} of all models
    that read `read` tokens; trained: {name: model} of the models that read `learned` tokens again,
    and learn from them.
    """
    peak = peak_flops(dtype, device)
    if not peak:
        return {}
    flops = read * sum(map(flops_a_token, models.values()))
    flops += learned * sum(flops_a_token(model, trained=True) for model in trained.values())
    ranks = sum(map(len, parallel.roles.values())) or parallel.rank_and_size()[1]
    return {"time/mfu": flops / (seconds * peak * ranks)}


def peak_flops(dtype, device):
    """
    The peak of one rank's GPU, in floating-point operations a second, from its maker, for 16 bits;
    None where it is not known: in other dtypes, and for other GPUs.
    """
    if dtype not in ("bfloat16", "float16"):
        return None
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    return next((1e12 * peak for name, peak in PEAK_TFLOPS.items() if name in words), None)


def flops_a_token(model, trained=False):
    """
    The floating-point operations of a model for one token: 2 N in a forward pass. Trained: 2 N more
    for the gradients of activations, and 2 for each weight that has a gradient, so 6 N. N is the
    number of parameters without the embeddings, which are only looked up, unless they are the LM
    head, too. All experts of a mixture are counted. Attention's own operations are not.
    """
    looked_up = {id(p) for m in model.modules() if isinstance(m, torch.nn.Embedding)
                 for p in m.parameters()}
    head = model.hf.get_output_embeddings() if model.head == "lm" else None
    looked_up -= {id(p) for p in head.parameters()} if head else set()
    parameters = [p for p in model.parameters() if id(p) not in looked_up]
    forward = 2 * sum(p.numel() for p in parameters)
    with_gradient = sum(p.numel() for p in parameters if p.requires_grad)
    return 2 * forward + 2 * with_gradient if trained else forward
