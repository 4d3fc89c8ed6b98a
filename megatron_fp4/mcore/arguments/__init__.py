"""What the launch and its refusals both ask of Megatron's arguments and of the machine."""
