"""
The keys and values of the tokens so far, while a policy decodes: transformers' cache with one
change. Its DynamicLayer copies all columns to append one. Here a layer has spare columns, and the
keys and values of a token are written into the next one.
"""
import torch
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

SPARE = 64  # columns


class RoomyLayer(DynamicLayer):
    """
    A layer that sees all tokens. rooms: its keys and its values, (rows, heads, columns, width)
    each, with spare columns behind the used ones; self.keys and self.values are views of them.
    """

    def update(self, key_states, value_states, *args, **kwargs):
        """Append (rows, heads, k, width) of k new tokens. Returns all keys and all values."""
        new = key_states, value_states
        device = key_states.device.type
        if torch.is_autocast_enabled(device):
            # rotary tables are fp32, and so are the keys; attention would round all of them to 16
            # bits at every token
            new = [x.to(torch.get_autocast_dtype(device)) for x in new]
        if not self.is_initialized:
            self.lazy_initialization(*new)
        begin = self.get_seq_length()
        end = begin + key_states.shape[-2]
        if begin == 0:
            self.rooms = [pad(x, (0, 0, 0, SPARE)) for x in new]
        elif end > self.rooms[0].shape[-2]:
            self.rooms = [pad(torch.cat([old, x], -2), (0, 0, 0, SPARE))
                          for old, x in zip((self.keys, self.values), new, strict=True)]
        else:
            for room, x in zip(self.rooms, new, strict=True):
                room[:, :, begin:end] = x
        self.keys, self.values = (room[:, :, :end] for room in self.rooms)
        return self.keys, self.values

    def batch_select_indices(self, indices):
        """Keep only these rows, in this order; a row may come several times."""
        used = self.get_seq_length()
        if used:
            self.rooms = [room[indices] for room in self.rooms]
            self.keys, self.values = (room[:, :, :used] for room in self.rooms)


def decoding_cache(config):
    """An empty cache for a model of transformers. Layers of other kinds are transformers' own."""
    cache = DynamicCache(config=config)
    if any(hasattr(layer, "conv_states") for layer in cache.layers):
        from options.families import HybridCache

        cache = HybridCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer
                    for layer in cache.layers]
    return cache
