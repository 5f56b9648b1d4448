"""model.decoding_cache against transformers' own cache: the same columns, and none is copied."""
import torch
from transformers import DynamicCache, Gemma3TextConfig, GPT2Config
from transformers.cache_utils import DynamicSlidingWindowLayer

from model import SPARE, decoding_cache, roomy_layer


def test_columns_and_rows_are_those_of_transformers():
    config, drawn = GPT2Config(n_layer=1), torch.Generator().manual_seed(1)
    ours, theirs = decoding_cache(config), DynamicCache(config=config)
    lengths = [5, *[1] * (SPARE - 1), 3, *[1] * 70]  # room for all of the first, then not
    select = {0: [2, 0, 0, 1], SPARE - 2: [3, 1], SPARE: [1, 0, 1], SPARE + 9: [2]}
    rows, moved = 3, 0
    for step, k in enumerate(lengths):
        new = [torch.randn(rows, 2, k, 4, generator=drawn) for _ in range(2)]
        place = ours.layers[0].buffers[0].data_ptr() if step else None
        for a, b in zip(ours.update(*new, 0), theirs.update(*new, 0), strict=True):
            assert torch.equal(a, b)
        assert ours.get_seq_length() == theirs.get_seq_length() == sum(lengths[:step + 1])
        moved += ours.layers[0].buffers[0].data_ptr() != place
        if step in select:
            rows = len(select[step])
            for cache in (ours, theirs):
                cache.batch_select_indices(torch.tensor(select[step]))
    assert moved == 3  # at the first step, and where the buffers were full


def test_layers_that_see_less_are_left_as_they_are():
    kinds = ["full_attention", "sliding_attention"]
    config = Gemma3TextConfig(num_hidden_layers=2, layer_types=kinds)
    assert [type(x) for x in decoding_cache(config).layers] == [
        roomy_layer(), DynamicSlidingWindowLayer]
