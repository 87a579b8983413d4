"""Adapters for frameworks that own the training loop: Lightning, Accelerate and the Hugging Face Trainer.

Each module imports its framework, and is imported by scripts that use it only.
"""
