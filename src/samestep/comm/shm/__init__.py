"""Ranks of one host that exchange tensors through memory that they share.

memory, gather   get it: every rank maps every other's, or nobody does
kernel           what Linux is asked for
board, header    what ranks show each other, and in what order memory is read and written
waiting          how a rank waits, and how it notices that it does so in vain
room, reduce,    how exchanges are carried out
exchanges
work,            the communicator
communicator
"""
