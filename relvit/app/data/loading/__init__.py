"""Load batches: the DataLoader, the training sampler, seeded augmentation, and evaluation over several processes."""
