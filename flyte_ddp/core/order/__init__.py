"""The global order of samples and their randomness: pure functions of (seed, epoch, step, sample)."""
