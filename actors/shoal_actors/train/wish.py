"""Asks the cluster's autoscaler for places that a run has not got.

Requests of all drivers are added up by an actor of Ray's, which every Ray Train run uses for its
own workers; what goes to the autoscaler past it would replace them all.
"""

from __future__ import annotations

import uuid
from types import TracebackType
from typing import Self

from ray.train import ScalingConfig
from ray.train.v2._internal.execution.scaling_policy import autoscaling_coordinator_client


class Wish:
    """Places asked for, for as long as the ``with`` block lasts; used in one thread at a time."""

    def __init__(self, worker: dict[str, float]) -> None:
        """``worker`` is what each place is to have."""
        self._scaling = ScalingConfig(
            num_workers=1, use_gpu="GPU" in worker, resources_per_worker=dict(worker)
        )
        self._client = autoscaling_coordinator_client.TrainAutoscalingCoordinatorClient(
            f"shoal-{uuid.uuid4().hex}"
        )
        self._num = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wish for nothing any more; what is left of a killed driver's wishes expires."""
        self.ask(0)

    def ask(self, num: int) -> None:
        """Wish for ``num`` places in all; to be called again while they are wished for."""
        if num == 0:
            if self._num:
                self._client.cancel_resource_request()
        elif num != self._num:
            self._client.send_resource_request(self._scaling, num)
        else:
            self._client.maybe_send_resource_request(self._scaling, num)
        self._num = num
