"""Load weights of other models: conversion of names and shapes, transfer between sizes and classes."""
