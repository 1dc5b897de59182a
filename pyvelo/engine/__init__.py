"""The step loop: who runs, which arrays describe it, what its tokens become."""
