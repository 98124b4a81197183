"""The torch.distributed backend "samestep": collectives on the CPU through memory that the ranks of a host share.

calls     what a call of torch.distributed comes to: which exchanges, and where their results belong
forms     how torch calls a process group's methods
control   how the ranks of a new group tell each other what they need to share memory
work      an exchange under way, as torch.distributed sees it
progress  a thread that carries on with exchanges that nobody waits for
group     the process group
"""
