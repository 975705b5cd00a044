"""What runs in vLLM's scheduler process: decisions on requests, plans for the workers, reports. Nothing here touches KV
or torch, or waits for the hub longer than ``LoadScheduler.wait_left_s`` a step.
"""
