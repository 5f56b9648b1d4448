"""
The keys and values of the tokens so far, while a policy decodes: transformers' cache with one
change. transformers' DynamicLayer copies all its columns to append a token. Here a layer has spare
columns, and a token is written into the next one.
"""
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

SPARE = 64  # columns


class RoomyLayer(DynamicLayer):
    """
    A layer with full attention. rooms: its keys and its values, (rows, heads, columns, width) each,
    with spare columns behind the used ones; self.keys and self.values are views of them. column:
    None; or, after `hold`, a tensor: the column into which the next token is written.
    """
    column = None

    def update(self, key_states, value_states, *args, **kwargs):
        """Append (rows, heads, k, width) of k new tokens. Returns all keys and all values."""
        if self.column is not None:
            for room, new in zip(self.rooms, (key_states, value_states), strict=True):
                room.index_copy_(2, self.column, new)
            return tuple(self.rooms)  # with the spare columns, which a mask must hide
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin = self.get_seq_length()
        end = begin + key_states.shape[-2]
        if begin == 0 or end > self.rooms[0].shape[-2]:
            self.rooms = [self.larger(old, new, end + SPARE) for old, new
                          in ((self.keys, key_states), (self.values, value_states))]
        for room, new in zip(self.rooms, (key_states, value_states), strict=True):
            room[:, :, begin:end] = new
        self.keys, self.values = (room[:, :, :end] for room in self.rooms)
        return self.keys, self.values

    def larger(self, old, new, columns):
        """The keys or values so far in a tensor of more columns: (rows, heads, columns, width)."""
        room = new.new_empty(*new.shape[:2], columns, new.shape[-1])
        if old.numel():
            room[:, :, :old.shape[-2]] = old
        return room

    def hold(self, used, columns, column):
        """
        Keep the first `used` columns, in rooms of so many columns with fixed addresses. From now on
        the one new token of each row is written to `column`, a tensor (1,); None: as before.
        """
        full, self.rooms = self.rooms, []
        for room in full:
            # a hidden column is multiplied by 0, so it must have no NaN
            self.rooms.append(room.new_zeros(*room.shape[:2], columns, room.shape[-1]))
            self.rooms[-1][:, :, :used] = room[:, :, :used]
        self.keys, self.values = (room[:, :, :used] for room in self.rooms)
        self.column = column

    def batch_select_indices(self, indices):
        """Keep only these rows, in this order; a row may come several times."""
        used = self.get_seq_length()
        if used:
            self.rooms = [room[indices] for room in self.rooms]
            self.keys, self.values = (room[:, :, :used] for room in self.rooms)


def decoding_cache(model_config):
    """An empty cache for a model of transformers. Layers of other kinds are transformers' own."""
    cache = DynamicCache(config=model_config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer
                    for layer in cache.layers]
    return cache
