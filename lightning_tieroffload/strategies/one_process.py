"""Floor 6. Devices, ranks and processes of Lightning's two faces: one process with one device, in either's words.

Owns what the Trainer's strategy and Fabric's have to answer alike. Stands in front of the `ParallelStrategy` of the
family that asks; see [Note: one class per package family].
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

from lightning_tieroffload.strategies import face

__all__ = ["OneProcess"]

_ONE_DEVICE = (
    "Set devices=1 and num_nodes=1 (devices=[3] or CUDA_VISIBLE_DEVICES=3 chooses which one), and start the script "
    "once, without torchrun."
)


class OneProcess:
    """What a strategy says of its device and rank. `self` is the strategy of a family: it has what that one's base has.

    `_fabric_root` is the package of the family's Fabric, `_face_name` what an error calls the face.
    """

    _fabric_root: str
    _face_name: str

    @property
    def root_device(self: Any) -> torch.device:
        device: torch.device = (self.parallel_devices or [])[self.local_rank]
        return device

    @property
    def num_processes(self: Any) -> int:
        return len(self.parallel_devices or ())

    def set_world_ranks(self: Any) -> None:
        environment = self.cluster_environment
        if environment is not None:
            environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            environment.set_world_size(self.num_nodes * self.num_processes)
        rank = self.global_rank
        self._utilities("rank_zero").rank_zero_only.rank = rank
        importlib.import_module("lightning_utilities.core.rank_zero").rank_zero_only.rank = rank

    def _configure_launcher(self: Any) -> None:
        # The connector has just set devices, nodes and ranks: the first moment at which they are all known.
        num_processes = max(self.world_size, self.num_nodes * self.num_processes)
        face.refuse_several_processes(num_processes, face=self._face_name, remedy=_ONE_DEVICE)

    def setup_environment(self) -> None:
        super().setup_environment()  # type: ignore[misc]
        self.set_world_ranks()

    def _reduced(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        if isinstance(tensor, torch.Tensor):
            return self._utilities("distributed")._sync_ddp_if_available(tensor, group, reduce_op=reduce_op)
        return tensor

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._utilities("distributed")._distributed_is_initialized():
            torch.distributed.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not self._utilities("distributed")._distributed_is_initialized():
            return obj
        objects = [obj]
        torch.distributed.broadcast_object_list(objects, src)
        return objects[0]

    def _utilities(self, name: str) -> ModuleType:
        return importlib.import_module(f"{self._fabric_root}.utilities.{name}")
