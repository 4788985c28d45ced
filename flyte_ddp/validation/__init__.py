"""Whether a data set is fit for training: looked through once, and compared with what the champion was trained on."""
