"""What several tests need: measuring instruments, each tested by itself."""
