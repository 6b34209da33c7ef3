"""Attention with a joint bias (BEiT's, Swin's: a number per offset and head) in Triton kernels, for GPUs.

Forward and backward look the bias of each pair of tokens up in the table, tile by tile, so nothing of N x N is in memory.
Besides inputs, result and log-sum-exp there is one float32 number per offset, and in backward about four for each.
"""
