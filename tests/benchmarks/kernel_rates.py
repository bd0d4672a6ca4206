"""Update kernels beside torch's fused AdamW and a triad, in turns within one run, as one JSON object. No pytest needed.

    python tests/benchmarks/kernel_rates.py [--threads 1,8,16] [--numel 67108864] > rates.json

``ratio_to_torch`` compares elements a second; ``frac_of_triad`` the bytes that a pass must move with what a triad
(a = b + s·c, Numba, the same threads) moves a second. Absolute figures belong to a machine and a moment.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch

from lightning_tieroffload.kernels import registry
from lightning_tieroffload.kernels.adam import MOMENTS_LATER, MOMENTS_ONLY
from lightning_tieroffload.kernels.pool import KernelPool
from lightning_tieroffload.kernels.split import SplitMaster, split_f32

GROUP = torch.optim.AdamW([torch.zeros(1)]).defaults
# Bytes that one pass must read and write, an element: weight, gradient and two moments in fp32; or the split master.
FORMS = {
    "plain": 4 + 4 + 8 + 12,
    "split, bf16 grad": 4.125 + 2 + 8 + 12.125,
    "split, bf16 grad, weights": 4.125 + 2 + 8 + 4.125,
    "split, bf16 grad, moments": 2 + 8 + 8,
}
TORCH_NBYTES = 4 + 4 + 8 + 12
TRIAD_NBYTES = 12


@numba.njit(nogil=True, fastmath=True)
def _triad(a: Any, b: Any, c: Any) -> None:
    for i in range(len(a)):
        a[i] = b[i] + np.float32(3.0) * c[i]


def arrays_of(numel: int) -> dict[str, Any]:
    """What `measure` works on, of `numel` elements each."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(numel, dtype=np.float32)
    master = SplitMaster.empty(numel)
    split_f32(values, master.hi_u16, master.lo_u16, master.ties_u8)
    grad = rng.standard_normal(numel, dtype=np.float32)
    param = torch.nn.Parameter(torch.from_numpy(values.copy()))
    param.grad = torch.from_numpy(grad.copy())
    return {
        "values": values,
        "master": master,
        "grad": grad,
        "narrow": torch.from_numpy(grad).bfloat16().view(torch.uint16).numpy(),
        "states": {name: np.full(numel, 1e-3, np.float32) for name in ("exp_avg", "exp_avg_sq")},
        "torch": torch.optim.AdamW([param], fused=True),
        "triad": [np.ones(numel, np.float32) for _ in range(3)],
    }


def measure(num_threads: int, arrays: dict[str, Any], num_rounds: int = 5) -> list[dict[str, Any]]:
    """One line for each form. Every round runs all of them once: all see the same neighbours."""
    numel = len(arrays["values"])
    kernel: Any = registry.find_kernel(torch.optim.AdamW, GROUP, torch.float32)
    states, grad, narrow = arrays["states"], arrays["grad"], arrays["narrow"]
    torch.set_num_threads(num_threads)
    with KernelPool(num_threads) as pool:
        works: dict[str, Callable[[], Any]] = {
            "torch": arrays["torch"].step,
            "triad": lambda: pool.run(lambda begin, end: _triad(*(each[begin:end] for each in arrays["triad"])), numel),
        }
        how: dict[str, Any] = {"step": 2, "group": GROUP}
        for form in FORMS:
            master, own_grad = (arrays["values"], grad) if form == "plain" else (arrays["master"], narrow)
            moments = {"weights": {"moments": MOMENTS_LATER}, "moments": {"moments": MOMENTS_ONLY}}
            more = moments.get(form.rsplit(", ", 1)[-1], {})
            works[form] = lambda master=master, own_grad=own_grad, more=more: kernel.submit(
                pool, master, own_grad, states, **how, **more
            ).result()
        best_s = dict.fromkeys(works, float("inf"))
        for index in range(num_rounds + 1):
            for name, work in works.items():
                begin_s = time.perf_counter()
                work()
                if index:  # the first one compiles, and touches memory
                    best_s[name] = min(best_s[name], time.perf_counter() - begin_s)
    triad_bytes_per_s = TRIAD_NBYTES * numel / best_s["triad"]
    return [
        {
            "form": form,
            "num_threads": num_threads,
            "gparam_per_s": numel / best_s[form] / 1e9,
            "torch_gparam_per_s": numel / best_s["torch"] / 1e9,
            "ratio_to_torch": best_s["torch"] / best_s[form],
            "bytes_per_s": nbytes * numel / best_s[form],
            "triad_bytes_per_s": triad_bytes_per_s,
            "frac_of_triad": nbytes * numel / best_s[form] / triad_bytes_per_s,
            "torch_frac_of_triad": TORCH_NBYTES * numel / best_s["torch"] / triad_bytes_per_s,
        }
        for form, nbytes in FORMS.items()
    ]


def thread_counts() -> list[int]:
    """1, 2, 4, … and all the cores there are."""
    most = os.cpu_count() or 1
    return sorted({most, *(1 << k for k in range(most.bit_length()) if 1 << k <= most)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default=",".join(map(str, thread_counts())))
    parser.add_argument("--numel", type=int, default=1 << 26)
    arguments = parser.parse_args()
    arrays = arrays_of(arguments.numel)
    lines = [line for count in arguments.threads.split(",") for line in measure(int(count), arrays)]
    machine = {"num_cpus": os.cpu_count(), "load_1min": os.getloadavg()[0], "torch": torch.__version__}
    print(json.dumps({"numel": arguments.numel, "machine": machine, "rates": lines}, indent=1))


if __name__ == "__main__":
    main()
