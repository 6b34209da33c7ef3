"""Attention with a joint bias (BEiT's, Swin's: a number per offset and head) in Triton kernels, for GPUs.

Forward and backward look the bias of each pair of tokens up in the table, tile by tile: no N x N tensor is in memory.
Besides inputs, result and log-sum-exp, memory holds one float32 number per offset and head, or two and a half numbers
per offset and head if there are prefix tokens (see `offsets.layout`). If the table needs a gradient, backward divides
the samples into parts, sums up each part separately, and holds up to four further numbers per offset and head for each
part; more if the sides of the grid are not multiples of a tile's sides (see `table_gradient`). The kernels compute the
same as flash attention, with one more load for each pair, and two more products for each pair if the table needs a
gradient.
"""
