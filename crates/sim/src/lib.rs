//! A simulated device with its own memory, queue, latencies, limits and faults.
