"""samestep: data-parallel training for PyTorch in which every worker takes the same step."""
