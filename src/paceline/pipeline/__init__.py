"""Pipeline parallelism: stages, microbatches and the loss of a batch made of them."""
