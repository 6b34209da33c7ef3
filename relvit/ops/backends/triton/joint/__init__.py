"""Attention with a joint bias (BEiT's, Swin's: a number per offset and head) in Triton kernels, for GPUs.

Forward and backward look the bias of each pair of tokens up in the table, tile by tile: no N x N tensor is in memory.
Besides inputs, result and log-sum-exp, memory holds one float32 number per offset and head, or two and a half numbers
if there are prefix tokens (see `offsets.layout`). If the table needs a gradient, memory in backward holds up to four
further numbers for each part of the samples that is summed apart, more if sides are not multiples of a tile's (see
`table_gradient`). The kernels compute the same as flash attention, with one more load for each pair, and two more
products for each pair if the table needs a gradient.
"""
