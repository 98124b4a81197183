"""Moving tensors between ranks: one verb, `Communicator.start(op) -> Work`, and transports that serve it."""

from samestep.comm.base import Communicator, Work
from samestep.comm.ops import Reduction
from samestep.comm.select import all_reduce, communicator_for, connect

__all__ = ["Communicator", "Reduction", "Work", "all_reduce", "communicator_for", "connect"]
