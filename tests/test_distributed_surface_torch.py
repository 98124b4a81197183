"""What torch's class tells of its work, and what was private in it and is used."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from models import Choosing, Recorder, equal, grads, linear, mlp, samples, wrap
from torch import Tensor, nn
from torch.futures import Future

from samestep.comm.base import Communicator
from samestep.errors import ReplicaError
from samestep.parallel.distributed import DistributedDataParallel
from samestep.parallel.statistics import Statistics
from samestep.testing.ranks import run_threads

# Data on the work done


def test_iterations_are_timed_at_first_and_then_now_and_again() -> None:
    now = iter(range(0, 10**6, 10))
    statistics = Statistics(lambda: next(now))
    statistics.sample_rate = 4
    published = []
    for _ in range(21):
        statistics.forward()
        published.append(statistics.iteration)
        statistics.begin("backward")
        statistics.begin("backward")
        statistics.begin("exchange")
        statistics.end("backward")
        statistics.end("exchange")
    assert published == [0, *range(1, 11), 10, 12, 12, 12, 12, 16, 16, 16, 16, 20]
    times = statistics.times()
    assert times["avg_forward_compute_time"] == times["forward_compute_time"] == 10
    assert times["backward_compute_time"] == times["backward_comm_time"] == 20
    assert times["backward_compute_comm_overlap_time"] == 10
    assert times["backward_comm_time_end"] - times["forward_compute_time_start"] == 40


def test_an_iteration_without_an_exchange_publishes_nothing() -> None:
    statistics = Statistics(iter(range(100)).__next__)
    statistics.forward()
    statistics.begin("backward")
    statistics.forward()
    assert statistics.times() == {}


def test_data_says_what_was_asked_for_and_done() -> None:
    def rank(comm: Communicator) -> None:
        model = wrap(Choosing(), comm, bucket_cap_mb_list=[0.00001, 2], find_unused_parameters=True)
        data = model._get_ddp_logging_data()
        assert data["bucket_sizes"] == "16, 144"
        assert (data["has_rebuilt_buckets"], data.get("rebuilt_bucket_sizes")) == (0, None)
        for both in (True, False):
            model(samples(2), both).sum().backward()
        data = model.logger._get_ddp_logging_data()
        words, numbers = data.strs_map, data.ints_map
        assert words["module_name"] == "Choosing"
        assert words["dtypes"] == "double"
        assert words["backend_name"] == "_ThreadCommunicator"
        assert set(words["rebuilt_per_bucket_param_indices"].replace(",", "").split()) == set("0123")
        assert words["prev_iteration_grad_ready_order_indices"] in ("1, 0", "0, 1")
        assert (numbers["rank"], numbers["world_size"]) == (comm.rank, 2)
        assert (numbers["num_parameter_tensors"], numbers["total_parameter_size_bytes"]) == (4, 160)
        assert (numbers["unused_parameter_size"], numbers["can_set_static_graph"]) == (80, 0)
        assert (numbers["bucket_cap_bytes"], numbers["find_unused_parameters"]) == (2 << 20, 1)
        assert model.bucket_bytes_cap_list == [10, 2 << 20]
        assert model.reducer._get_local_used_map().tolist() == [2, 2, 0, 0]
        assert not model.reducer._ddp_graph_static()
        model.logger.set_error_and_log("strange")
        assert model._get_ddp_logging_data()["error"] == "strange"

    run_threads(rank, 2)


def test_the_sample_rate_is_at_least_1() -> None:
    def rank(comm: Communicator) -> None:
        model = wrap(linear(), comm)
        with pytest.raises(ValueError, match="sample rate should be equal or greater than 1"):
            model._set_ddp_runtime_logging_sample_rate(0)
        model.reducer._set_ddp_runtime_logging_sample_rate(3)

    run_threads(rank, 1)


# What was private


def test_a_static_graph_is_set_before_training() -> None:
    def rank(comm: Communicator) -> None:
        model = wrap(linear(), comm)
        model._set_static_graph()
        assert model.static_graph
        with pytest.warns(UserWarning, match="no need to set it again"):
            model._set_static_graph()
        late = wrap(linear(), comm)
        late(samples(2)).sum().backward()
        with pytest.raises(RuntimeError, match="should be called before training loop starts"):
            late._set_static_graph()
        late._set_ddp_sink_clone(False)

    run_threads(rank, 1)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError


def test_a_backward_that_failed_is_not_finished() -> None:
    def rank(comm: Communicator) -> None:
        module = mlp()
        model = wrap(module, comm)
        model._check_reducer_finalized()
        with pytest.raises(ArithmeticError):
            module[2](Failing.apply(module[:2](samples(2)))).sum().backward()
        with pytest.raises(ReplicaError, match=r"rank 0: Expected to have finished reduction in the prior iteration"):
            model.reducer._check_reducer_finalized()
        model(samples(2)).sum().backward()
        model._check_reducer_finalized()

    run_threads(rank, 1)


def test_without_its_hooks_a_wrapper_exchanges_nothing() -> None:
    def rank(comm: Communicator) -> None:
        recorder = Recorder(comm)
        model = wrap(linear(), recorder)
        model._remove_autograd_hooks()
        recorder.log.clear()
        model.module(samples(2)).sum().backward()
        assert recorder.log == []

    run_threads(rank, 1)


def test_the_reducer_has_what_means_something_and_says_so() -> None:
    def rank(comm: Communicator) -> None:
        model = wrap(linear(), comm)
        assert model.reducer._rebuild_buckets() is False
        assert model.reducer._get_local_used_map().tolist() == [0, 0]
        with pytest.raises(
            AttributeError, match=r"no C\+\+ reducer, and nothing in the place of its _push_all_rebuilt"
        ):
            model.reducer._push_all_rebuilt_params()
        with pytest.raises(NotImplementedError, match="needs no metadata of sparse gradients"):
            model._set_sparse_metadata({})

    run_threads(rank, 1)


def test_attributes_and_methods_by_torchs_names() -> None:
    def rank(comm: Communicator) -> None:
        module = nn.Sequential(linear(), nn.Embedding(3, 2, sparse=True), nn.BatchNorm1d(2))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.bias", "2.running_mean"])
        model = wrap(module, comm)
        names = [n for n, _ in model._get_data_parallel_params(module, named_params=True)]
        assert names == ["0.weight", "1.weight", "2.weight", "2.bias"]
        assert len(list(model._get_data_parallel_params(module))) == 4
        assert list(model.named_module_buffers) == ["2.running_var", "2.num_batches_tracked"]
        parameters, sparse = model._build_params_for_reducer()
        assert sparse == [False, True, False, False]
        assert model._build_debug_param_to_name_mapping(parameters) == dict(enumerate(names))
        assert (model.device_type, model.is_multi_device_module, model._distributed_rank) == ("cpu", False, comm.rank)
        assert (model.mixed_precision, model.device_mesh, model.bucket_bytes_cap) == (None, None, 25 << 20)
        assert DistributedDataParallel._get_active_ddp_module() is None  # what torch.compile asks for
        assert model.to_kwargs((torch.ones(1),), {"a": 1}, None)[1] == [{"a": 1}]

    run_threads(rank, 1)


def test_a_wrapper_goes_on_over_another_group() -> None:
    def rank(comm: Communicator) -> list[Tensor | None]:
        model = wrap(mlp(), comm)
        calls: list[int] = []

        def hook(_: None, bucket: Any) -> Any:
            calls.append(bucket.index())
            future: Future[Tensor] = Future()
            future.set_result(model.communicator.all_reduce(bucket.buffer()) / model.communicator.size)
            return future

        model.register_comm_hook(None, hook)
        model(samples(2, comm.rank)).sum().backward()
        part = comm.split([0, 1])
        if part is not None:
            model.zero_grad()
            model._update_process_group(part)
            model(samples(2, comm.rank)).sum().backward()
            assert len(calls) == 2
        return grads(model)

    first, second, _ = run_threads(rank, 3)
    assert equal(first, second)
    local = mlp()
    for other in range(2):
        (local(samples(2, other)).sum() / 2).backward()
    for got, expected in zip(first, grads(local), strict=True):
        assert torch.allclose(got, expected, rtol=1e-13)  # type: ignore[arg-type]


def test_only_a_wrapper_over_the_default_group_is_pickled() -> None:
    def rank(comm: Communicator) -> None:
        model = wrap(linear(), comm)
        with pytest.raises(RuntimeError, match="only supported when using DDP with the default process group"):
            pickle.dumps(model)
        assert copy.deepcopy(model).communicator is comm

    run_threads(rank, 1)
