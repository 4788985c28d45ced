"""Load batches of a prepared data set onto the device."""
