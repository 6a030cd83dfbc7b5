"""Arrays of consecutive numbers, which batches need as request rows and as q_indptr of decodes."""

import torch

from fovea.torch.backend_cache import current_stream
from fovea.torch.dtypes import indexed_device

# Earlier, shorter arrays stay, because captured graphs hold their addresses.
_ARRAYS: dict[torch.device, list[torch.Tensor]] = {}


def consecutive(count: int, device: torch.device) -> torch.Tensor:
    """Returns 0, 1, ... count - 1 as int32 on the device. The array must not be written."""
    device = indexed_device(device)
    arrays = _ARRAYS.setdefault(device, [])
    if not arrays or arrays[-1].shape[0] < count:
        array = torch.arange(max(1 << (count - 1).bit_length(), 1024), dtype=torch.int32, device=device)
        if current_stream(device)[1]:
            return array[:count]  # memory of the graph that is being captured
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # other streams read it, too
        arrays.append(array)
    return arrays[-1][:count]
