"""What tests share: jobs, worlds, processes, fake engines and real ones."""
