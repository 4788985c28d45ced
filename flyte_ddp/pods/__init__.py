"""What runs in the pods of a cluster, whatever platform starts them."""
